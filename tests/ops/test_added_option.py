"""A new option of the operator touches six files: its declaration, the Problem's field, and the four backends.

The option `value_scale` is added to a copy of the package, which then runs in a process of its own. The public
functions, the registered operator, its schema, fake kernels and autograd take it without a change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import traformer

FUSED = """

_forward, _backward = forward, backward


def forward(problem):
    result = _forward(problem)
    return result._replace(out=result.out * problem.value_scale)


def backward(problem, grad_out, saved):
    scale = problem.value_scale
    return _backward(problem, grad_out * scale, saved._replace(out=saved.out / scale))
"""
PLAIN = """

_forward = forward


def forward(problem):
    return _forward(problem) * problem.value_scale
"""
# file -> what is put after which line; without a line, at the end
CHANGES = {
    "options.py": [
        ("    surrogate_width: float | None\n", "    value_scale: float  # default 1\n"),
        (
            "        surrogate_width=surrogate_width if needs_grad else 0.0,\n",
            '        value_scale=_number("value_scale", options.get("value_scale", 1.0)),\n',
        ),
    ],
    "problem.py": [
        (
            "    surrogate_width: float = 0.0  # > 0: removed keys have a gradient, see api.py\n",
            "    value_scale: float = 1.0\n",
        )
    ],
    "reference.py": [("", PLAIN)],
    "blockwise.py": [("", FUSED)],
    "cpu.py": [("", FUSED)],
    "triton/__init__.py": [("", FUSED)],
}
SCRIPT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]  # an editable install's comes first

import torch
import traformer
assert traformer.__file__.startswith(sys.argv[1]), traformer.__file__
from traformer.errors import InputError
from traformer.ops import attention_stats, available_backends, threshold_relative_attention

torch.manual_seed(0)
inputs = [torch.randn(2, 3, 40, 16, requires_grad=True) for _ in range(3)]
inputs.append((-torch.rand(2, 3, 40)).requires_grad_())
for backend in available_backends():
    plain = threshold_relative_attention(*inputs, backend=backend, tolerance=0.0)
    scaled = threshold_relative_attention(*inputs, backend=backend, tolerance=0.0, value_scale=2.0)
    torch.testing.assert_close(scaled, 2 * plain)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (plain, scaled)]
    for one, four in zip(*gradients):
        torch.testing.assert_close(four, 4 * one, rtol=1e-4, atol=1e-4)
    print(backend)
arguments = torch.ops.traformer.threshold_relative_attention.default._schema.arguments
assert arguments[-1].name == "value_scale"
try:
    attention_stats(inputs[0], inputs[1], inputs[3], value_scale=2.0)
except InputError as error:
    print(error)
"""


def test_an_option_is_six_files(tmp_path):
    assert len(CHANGES) == 6
    package = tmp_path / "traformer"
    shutil.copytree(Path(traformer.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in CHANGES.items():
        file = package / "ops" / "threshold_relative" / name
        text = file.read_text(encoding="utf-8")
        for after, added in changes:
            assert not after or text.count(after) == 1, f"{name} has not {after!r} once"
            text = text.replace(after, after + added) if after else text + added
        file.write_text(text, encoding="utf-8")
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"reference", "blockwise"} <= set(result.stdout.split())
    assert "unknown option 'value_scale'" in result.stdout
