"""The compiled kernel against the eager formula over drawn problems, once per instruction set that this machine has.

`make sanitize` runs this file on a build with AddressSanitizer and UBSan.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.cases import rms_norm
from traformer.ops import attention_map, threshold_relative_attention
from traformer.ops.threshold_relative import cpu
from traformer.ops.threshold_relative.api import _call, _options

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))
ISAS = [name for name, usable in cpu.instruction_sets().items() if usable]
NAMES = ("out", "dq", "dk", "dv", "dlog_decay")


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv(cpu.ISA_VARIABLE, request.param)
    assert cpu.instruction_set() == request.param


@st.composite
def problems(draw):
    """(q, k, v, log_decay), options, threads."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    packed = draw(st.booleans())
    batch = 1 if packed else draw(st.integers(1, 2))
    key_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    heads = key_heads * group
    width = draw(st.sampled_from([8, 16, 24, 32, 64, 72, 128, 136]))
    queries = draw(st.one_of(st.integers(1, 9), st.integers(10, 200)))
    keys = queries + draw(st.one_of(st.just(0), st.integers(0, 150)))
    start = keys - queries if draw(st.booleans()) else draw(st.integers(0, keys - queries))
    lean = draw(st.sampled_from([-4.0, -0.3, 0.0, 0.3, 4.0]))  # keep none ... all

    def rows(length, count):
        return torch.randn(batch, length, count, width, generator=generator)

    direction = torch.ones(width)
    q = rms_norm(rows(queries, heads) + abs(lean) * direction)
    k = rms_norm(rows(keys, key_heads) + lean * direction)
    v = rows(keys, key_heads)
    if draw(st.booleans()):  # scores within rounding of 0: keys orthogonal to some query but for the last bits
        for j in range(0, keys, 3):
            source = q[:, j % queries, ::group].unflatten(-1, (-1, 2))
            k[:, j] = torch.stack([-source[..., 1], source[..., 0]], -1).flatten(-2)
            if j % 2:
                k[:, j, :, 0] = torch.nextafter(k[:, j, :, 0], torch.tensor(torch.inf))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if draw(st.booleans()):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

    shape = (batch, heads, queries)
    decay = draw(st.sampled_from([0.0, -1e-8, -1e-4, -0.7, -100.0, "init", "long"]))
    if isinstance(decay, float):
        log_decay = torch.full(shape, decay)
    else:
        log_decay = torch.nn.functional.logsigmoid(
            torch.randn(shape, generator=generator) + (6 if decay == "long" else 0)
        )

    options: dict = {"tolerance": draw(st.sampled_from([0.0, 2**-24])), "query_start": start}
    if packed:
        cuts = draw(st.lists(st.integers(0, keys), max_size=4))
        options["cu_seqlens"] = torch.tensor([0, *sorted(cuts), keys])
    padding = draw(st.sampled_from(["none", "left", "right", "any"]))
    if padding != "none":
        position = torch.arange(keys)
        cut = torch.randint(0, keys, (batch, 1), generator=generator)
        options["key_padding_mask"] = {
            "left": position >= cut, "right": position <= cut, "any": torch.rand(batch, keys, generator=generator) > 0.4
        }[padding]  # fmt: skip
    own = draw(st.sampled_from(["no", "all", "some"]))
    if own != "no":
        options["exclude_self"] = True if own == "all" else torch.arange(heads) % 2 == 0
    limit = draw(st.sampled_from(["zero", "one", "adaptive"]))
    if limit != "zero":
        options["threshold"] = 1.0 if limit == "one" else torch.rand(shape, generator=generator)
    if draw(st.booleans()):
        options["surrogate_width"] = draw(st.sampled_from([0.1, 0.5]))
    return (q, k, v, log_decay), options, draw(st.sampled_from([1, 2, 4]))


def run(inputs, backend, dtype=torch.float32, **options):
    leaves = [x.detach().to(dtype).clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    out = threshold_relative_attention(*leaves, backend=backend, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return (out.detach(), *torch.autograd.grad(out, leaves, upstream))


def with_threads(threads, function):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


def kept_by_kernel(inputs, options):
    q, k, v, log_decay = inputs
    full = {"scale": None, "threshold": 0.0, "exclude_self": False, "key_padding_mask": None, "cu_seqlens": None,
            "query_start": None, "score_bound": None, "tolerance": 0.0} | options | {"tolerance": 0.0}  # fmt: skip
    with torch.no_grad():
        return _call(q, k, v, log_decay, _options(q, k, log_decay, **full), 0.0, None, None, "cpu")[3]


MANY = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(problems())
def test_equals_the_formula(isa, problem):
    inputs, options, threads = problem
    expected = run(inputs, "reference", **options)
    precise = run(inputs, "reference", torch.float64, **options)
    got = with_threads(threads, lambda: run(inputs, "cpu", **options))
    again = with_threads(threads, lambda: run(inputs, "cpu", **options))
    same_keys = torch.allclose(precise[0].float(), expected[0], atol=1e-3)  # else fp64's own sum decided otherwise
    truth = precise if same_keys else [x.double() for x in expected]
    for name, x, y, z, a in zip(NAMES, got, truth, expected, again, strict=True):
        assert torch.equal(x, a), f"{name} differs between two equal runs"
        size = y.abs().max().item() if y.numel() else 0.0
        allowed = 4 * (z - y).abs().max().item() + 1e-5 * size + 1e-6
        worst = (x - y).abs().max().item()
        assert worst <= allowed, f"{name} is off by {worst}, allowed {allowed}"
    position = {k: v for k, v in options.items() if k not in ("tolerance", "surrogate_width")}
    keep = attention_map(inputs[0], inputs[1], inputs[3], **position).keep
    assert torch.equal(kept_by_kernel(inputs, options), keep.sum(-1, dtype=torch.int32))


@MANY
@given(problems(), st.sampled_from(["q", "k", "v", "log_decay"]), st.sampled_from([torch.nan, torch.inf, -torch.inf]),
       st.integers(0, 10**6))  # fmt: skip
def test_what_is_not_finite_stays_in_the_rows_that_see_it(isa, problem, name, value, place):
    inputs, options, threads = problem
    which = ["q", "k", "v", "log_decay"].index(name)
    if name == "log_decay":
        value = -abs(value)
    options["tolerance"] = 0.0
    clean = run(inputs, "cpu", **options)
    dirty = [x.clone(memory_format=torch.preserve_format) for x in inputs]
    index = torch.unravel_index(torch.tensor(place % dirty[which].numel()), dirty[which].shape)
    dirty[which][index] = value
    expected = run(dirty, "reference", **options)
    got = with_threads(threads, lambda: run(dirty, "cpu", **options))
    bad = ~expected[0].isfinite().all(-1)
    assert torch.equal(~got[0].isfinite().all(-1), bad)
    for index_of, label in ((0, "out"), (1, "dq"), (4, "dlog_decay")):
        a, b = got[index_of][~bad], clean[index_of][~bad]
        assert torch.allclose(a, b, atol=1e-4 * max(1.0, b.abs().max().item() if b.numel() else 0.0)), label
    # A key that lies after the last bad row of its heads is seen by good rows only.
    key_heads, keys = inputs[1].shape[1:3]
    position = options["query_start"] + torch.arange(bad.shape[2])
    last = torch.where(bad, position, -1).amax(-1).unflatten(1, (key_heads, -1)).amax(-1)  # [B, Hkv]
    after = torch.arange(keys) > last.unsqueeze(-1)
    for index_of, label in ((2, "dk"), (3, "dv")):
        a, b = got[index_of][after], clean[index_of][after]
        assert torch.allclose(a, b, atol=1e-4 * max(1.0, b.abs().max().item() if b.numel() else 0.0)), label


@MANY
@given(problems(), st.floats(0.05, 0.9), st.integers(-(2**62), 2**62))
def test_dropout_draws_the_same_mask(isa, problem, p, seed):
    inputs, options, threads = problem
    options |= {"dropout_p": p, "dropout_seed": seed, "tolerance": 0.0}
    expected = run(inputs, "reference", **options)
    got = with_threads(threads, lambda: run(inputs, "cpu", **options))
    for name, x, y in zip(NAMES, got, expected, strict=True):
        size = max(1.0, y.abs().max().item())
        assert torch.allclose(x, y, atol=5e-4 * size, rtol=1e-3), name


@MANY
@given(problems(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_storage(isa, problem, dtype):
    inputs, options, threads = problem
    inputs = [x.to(dtype) for x in inputs]
    expected = run(inputs, "reference", torch.float32, **options)
    got = with_threads(threads, lambda: run(inputs, "cpu", dtype, **options))
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert torch.allclose(got[0].float(), expected[0], atol=2 * unit * max(1.0, expected[0].abs().max().item()), rtol=0)
    for name, x, y in zip(NAMES[1:], got[1:], expected[1:], strict=True):
        size = max(1.0, y.abs().max().item())
        assert (x.float() - y).abs().max().item() <= 16 * unit * size, name
