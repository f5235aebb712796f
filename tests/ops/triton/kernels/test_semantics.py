"""What every backend must do, at the smallest shapes that show it; against the fp64 formula, element by element."""

import pytest
import torch

from tests.ops.cases import assert_all_close, make, oracle, run
from traformer.errors import InputError
from traformer.ops import attention_map, attention_stats, threshold_relative_attention

slow = pytest.mark.slow


def problem(device, **options):
    options = {"batch": 1, "heads": 2, "key_heads": 1, "dtype": torch.float32} | options
    return [x.detach().to(device).requires_grad_() for x in make(**options)]


def check(inputs, rtol=2e-5, atol=2e-5, **options):
    assert_all_close(run(inputs, "triton", **options), oracle(inputs, **options), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "length,width,decay",
    [
        (70, 16, "init"),
        (1, 20, "zero"),
        *(
            pytest.param(length, width, decay, marks=slow)
            for length, width, decay in [
                (2, 32, "init"), (7, 64, "long"), (8, 72, "tiny"), (9, 128, "steep"), (63, 136, "init"),
                (129, 16, "long"), (129, 32, "zero"), (65, 256, "init"), (64, 1, "long"), (200, 24, "tiny"),
            ]
        ),
    ],
)  # fmt: skip
def test_lengths_head_sizes_and_decays(device, length, width, decay):
    check(problem(device, queries=length, width=width, decay=decay), atol=1e-5 + 1e-7 * length)


OPTIONS = {
    "threshold": {"threshold": 0.1},
    "threshold per query, own key by head, surrogate, dropout": {
        "threshold": torch.linspace(0, 0.6, 2 * 70).view(1, 2, 70),
        "exclude_self": torch.tensor([True, False]),
        "surrogate_width": 0.5,
        "dropout_p": 0.3,
        "dropout_seed": -(2**40) - 3,
    },
    "packed": {"cu_seqlens": torch.tensor([0, 1, 40, 40, 72, 90])},
    "padding": {"key_padding_mask": (torch.arange(90) % 5 > 0)[None] & (torch.arange(90) > 20)},
    "scale and bound per head": {"scale": 0.3, "score_bound": torch.tensor([4.9, 5.0])},
    "no early exit": {"tolerance": 0.0, "exclude_self": True},
}
QUICK = ("threshold per query, own key by head, surrogate, dropout", "packed", "padding")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in OPTIONS])
def test_options(device, name):
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
    check(problem(device, queries=70, keys=90, width=16), **options)


def test_what_is_in_padded_places_cannot_matter(device):
    real = ((torch.arange(70) % 5 > 0) & (torch.arange(70) > 20))[None].to(device)
    inputs = [x.detach() for x in problem(device, queries=70, width=16)]
    hole = ~real[:, None, :, None]
    poisoned = [inputs[0], *(torch.where(hole, torch.inf, x) for x in inputs[1:3]), inputs[3]]
    expected = run(inputs, "triton", key_padding_mask=real)
    for a, b in zip(run(poisoned, "triton", key_padding_mask=real), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_half_storage(device, dtype):
    inputs = problem(device, queries=129 if dtype == torch.float16 else 70, dtype=dtype, width=64)
    step = torch.finfo(dtype).eps
    got, expected = run(inputs, "triton"), oracle(inputs)
    assert_all_close(got[:1], expected[:1], rtol=2 * step, atol=2 * step)
    # As in every kernel for tensor cores, weights and their gradients are rounded before they are multiplied.
    for name, a, b in zip(("dq", "dk", "dv", "dlog_decay"), got[1:], expected[1:], strict=True):
        assert (a.double() - b).abs().max() <= 4 * step * b.abs().max(), name


@slow
@pytest.mark.parametrize("heads,key_heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_grouped_heads(device, heads, key_heads):
    check(problem(device, batch=2, heads=heads, key_heads=key_heads, queries=70, width=16))


@pytest.mark.parametrize("seen", ["queries after the last key", pytest.param("all", marks=slow)])
def test_a_static_caches_tail_is_never_read(device, seen):
    inputs = [x.detach().clone() for x in problem(device, queries=5, keys=100, width=16)]
    short = [inputs[0], inputs[1][:, :, :65], inputs[2][:, :, :65], inputs[3]]
    expected = run(short, "triton")
    inputs[1][:, :, 65:], inputs[2][:, :, 65:] = torch.nan, torch.inf
    got = run(inputs, "triton", query_start=60)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[2][:, :, :65], expected[2], rtol=1e-6, atol=1e-6)
    assert not got[2][:, :, 65:].any() and not got[3][:, :, 65:].any()


def test_rows_that_keep_nothing(device):
    q, k, v, g = problem(device, queries=100, width=16, normed=False)
    for x in run((q.detach().abs(), -k.detach().abs(), v, g), "triton"):
        assert not x.any()


def test_blocks_without_a_kept_key_are_passed_over_and_counted_right(device):
    """Only every 50th key can be kept: whole key blocks keep nothing, and strips begin within them."""
    q, k, v, g = (x.detach().clone() for x in problem(device, heads=1, queries=170, width=16, normed=False))
    q, k = q.abs(), k.abs()
    k[:, :, torch.arange(170) % 50 > 0] *= -1
    check((q, k, v, g * 0.1), tolerance=0.0)


def test_large_scores_take_the_running_maximum(device):
    """Without QK-norm, scores far beyond what exp can hold in fp32."""
    inputs = [x.detach() * (20.0 if n < 2 else 1.0) for n, x in enumerate(problem(device, queries=70, width=16))]
    check(inputs, rtol=2e-4, atol=2e-3)


@slow
def test_large_scores_in_half_precision(device):
    """fp16 weights would overflow without their shift: scores up to 11.3, 18 and beyond."""
    for factor in (1.0, 1.25, 2.0):
        inputs = problem(device, heads=1, queries=70, width=128, dtype=torch.float16, shift=1.0)
        inputs = [x.detach() * (factor if n < 2 else 1.0) for n, x in enumerate(inputs)]
        assert_all_close(run(inputs, "triton")[:4], oracle(inputs)[:4], rtol=4e-3, atol=8e-3)


@pytest.mark.parametrize("which,value", [("k", torch.inf), ("v", torch.nan), *(
    pytest.param(which, value, marks=slow) for which in "qkv" for value in (torch.nan, -torch.inf)
)])  # fmt: skip
def test_what_is_not_finite_stays_in_its_rows(device, which, value):
    inputs = [x.detach().clone() for x in problem(device, key_heads=2, queries=80, width=16)]
    clean = threshold_relative_attention(*inputs, backend="triton")
    keep = attention_map(inputs[0], inputs[1], inputs[3]).keep[0]
    inputs["qkv".index(which)][0, 1, 30, 3] = value
    out = threshold_relative_attention(*inputs, backend="triton", tolerance=0.0)
    hit = torch.zeros(2, 80, dtype=torch.bool, device=device)
    if which == "q":
        hit[1, 30] = True
    elif which == "k":
        hit[1, 30:] = True
    else:
        hit[1] = keep[1, :, 30]
    assert not out[0][hit].isfinite().any()
    torch.testing.assert_close(out[0][~hit], clean[0][~hit], rtol=1e-5, atol=1e-6)


def planted(device, dtype, width=16, length=70):
    """Random keys, some of them orthogonal to a query but for a hair to either side; and their exact choice."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, 2, length, width // 2, generator=generator).to(dtype)
    q = torch.cat([half, half], -1)
    k = torch.randn(1, 2, length, width, generator=generator).to(dtype)
    hard = torch.arange(0, length, 9)
    k[:, :, hard] = torch.cat([half, -half], -1)[:, :, hard]
    k[:, :, hard[::2], 3] = torch.nextafter(k[:, :, hard[::2], 3], k.new_tensor(torch.inf))
    exact = torch.zeros(1, 2, length, length, dtype=torch.float64)
    for channel in range(width):
        exact += q[..., channel].double()[..., None] * k[..., channel].double()[..., None, :]
    assert (exact.abs() < (1e-5 if dtype == torch.float32 else 0.1)).tril().sum() >= length
    return q.to(device), k.to(device), torch.full((1, 2, length), -0.01).to(device), (exact > 0).tril().to(device)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
def test_scores_planted_at_the_threshold(device, dtype):
    """The choice of keys is the exact one, in the forward, the backward and one query at a time."""
    q, k, g, keep = planted(device, dtype)
    stats = attention_stats(q, k, g.to(dtype), backend="triton", tolerance=0.0)
    assert torch.equal(stats.kept, keep.sum(-1).int())
    for i in (9, 66):
        step = attention_stats(
            q[:, :, i : i + 1], k[:, :, : i + 1], g[:, :, i : i + 1].to(dtype), backend="triton", tolerance=0.0
        )
        assert torch.equal(step.kept, stats.kept[:, :, i : i + 1])
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    if dtype == torch.float32:
        assert_all_close(run((q, k, v, g), "triton"), run((q, k, v, g), "reference"), rtol=2e-4, atol=2e-4)
    # One row alone has a gradient: dV is not 0 at the keys that it keeps in the backward, and only there.
    leaves = [x.detach().requires_grad_() for x in (q, k, v, g.to(dtype))]
    out = threshold_relative_attention(*leaves, backend="triton", tolerance=0.0)
    for i in (9, 45, 66):
        alone = torch.zeros_like(out)
        alone[:, :, i] = 1.0
        dv = torch.autograd.grad(out, leaves, alone, retain_graph=True)[2]
        assert torch.equal(dv.abs().amax(-1) > 0, keep[:, :, i])


def test_equal_runs_give_equal_bits(device):
    inputs = problem(device, queries=70, width=16)
    for a, b in zip(run(inputs, "triton"), run(inputs, "triton"), strict=True):
        assert torch.equal(a, b)


def test_what_it_cannot_take_is_named(device):
    q = torch.zeros(1, 1, 4, 300, device=device)
    with pytest.raises(InputError, match="head sizes up to 256"):
        threshold_relative_attention(q, q, q, q[..., 0], backend="triton")
    with pytest.raises(InputError, match="float32, bfloat16 and float16"):
        threshold_relative_attention(*(x.double() for x in problem(device, queries=4)), backend="triton")
