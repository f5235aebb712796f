"""Nothing between a call and its kernels looks at a value on the device: shown on CUDA tensors that hold no data.

The host's whole path runs, launches excepted. Reading a value of such a tensor raises, as it would break the capture of
a CUDA graph.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton as a GPU would use it", allow_module_level=True)

from traformer.ops.threshold_relative import triton as backend
from traformer.ops.threshold_relative.options import make_problem
from traformer.ops.threshold_relative.problem import Saved
from traformer.ops.threshold_relative.triton import backward_kernels, decode_kernels, forward_kernel, summaries


@pytest.fixture
def launched(monkeypatch):
    """Kernels launched so far. Each must have been given exactly its arguments."""
    names = []

    def launch(kernel, programs, like, **arguments):
        assert isinstance(programs, int) and programs > 0 and like.is_cuda
        given = set(arguments) - {"num_warps"}
        assert given == set(kernel.arg_names), given ^ set(kernel.arg_names)
        for name, x in arguments.items():
            assert x is None or isinstance(x, (torch.Tensor, bool, int, float)), name
            assert not isinstance(x, torch.Tensor) or x.is_cuda, name
        names.append(kernel.__name__)

    for module in (summaries, forward_kernel, backward_kernels, decode_kernels):
        monkeypatch.setattr(module, "launch", launch)
    return names


def draw(dtype=torch.bfloat16, queries=300, keys=300, width=64):
    q = torch.randn(2, 4, queries, width, dtype=dtype, device="cuda")
    k, v = (torch.randn(2, 2, keys, width, dtype=dtype, device="cuda") for _ in range(2))
    return q, k, v, -torch.rand(2, 4, queries, device="cuda")


OPTIONS = {
    "plain": lambda: {},
    "surrogate": lambda: {"surrogate_width": 0.5, "exclude_self": True},
    "thresholds": lambda: {"threshold": torch.rand(2, 4, 300, device="cuda"), "score_bound": 8.0},
    "padding": lambda: {"key_padding_mask": torch.ones(2, 300, dtype=torch.bool, device="cuda")},
    "dropout": lambda: {"dropout_p": 0.2, "tolerance": 0.0},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_and_backward(launched, name, dtype):
    with FakeTensorMode():
        q, k, v, log_decay = draw(dtype)
        problem = make_problem(q, k, v, log_decay, OPTIONS[name]())
        problem = problem._replace(needs_grad=True)
        result = backend.forward(problem)
        gradients = backend.backward(
            problem.for_backward(), torch.randn_like(q), Saved(result.out, result.normaliser, result.reach)
        )
    assert launched == [
        "summary_kernel", "forward_kernel", "summary_kernel", "query_gradient_kernel", "key_gradient_kernel"
    ]  # fmt: skip
    assert gradients.q.shape == q.shape and gradients.k.shape == k.shape and gradients.q.is_cuda


def test_packed_sequences(launched):
    with FakeTensorMode():
        q, k, v, log_decay = draw()
        first_key = torch.zeros(300, dtype=torch.int32, device="cuda")
        problem = make_problem(q, k, v, log_decay, {})._replace(first_key=first_key, needs_grad=True)
        backend.forward(problem)
    assert launched == ["summary_kernel", "forward_kernel"]


@pytest.mark.parametrize("indexed", [False, True])
def test_decode(launched, indexed):
    with FakeTensorMode():
        q, k, v, log_decay = draw(queries=1, keys=3000)
        problem = make_problem(q, k, v, log_decay, {"score_bound": 8.0})
        if indexed:
            low, high = (torch.empty(2, 2, 64, 64, device="cuda") for _ in range(2))
            norm = torch.empty(65, 2, 2, device="cuda").permute(
                1, 2, 0
            )  # its [:, :, 0] needs no copy, which needs CUDA
            problem = problem._replace(key_low=low, key_high=high, key_norm=norm)
        backend.forward(problem)
    assert launched == ["decode_kernel", "decode_kernel", "join_kernel"]


def test_a_value_cannot_be_read_unnoticed():
    """What the tests above rely on."""
    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        torch.zeros(1, device="cuda").item()
