"""Semantics that every backend shares, each against the fp64 oracle, element by element."""

import itertools
import math
import re

import pytest
import torch

from tests.ops.cases import DECAYS, DOUBLE, FUSED, HERE, LENGTHS, assert_all_close, make, oracle, run
from traformer.errors import InputError
from traformer.ops import attention_map, attention_stats, threshold_relative_attention
from traformer.ops.threshold_relative.options import AttentionOptions

fused = pytest.mark.parametrize("backend", FUSED)


@pytest.mark.parametrize("backend", [name for name in FUSED if name in DOUBLE])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_double_precision(backend, length, decay):
    inputs = make(queries=length, decay=decay)
    assert_all_close(run(inputs, backend, tolerance=0.0), oracle(inputs), rtol=1e-10, atol=1e-11)


@fused
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_single_precision(backend, length, decay):
    inputs = make(queries=length, decay=decay, dtype=torch.float32, width=32)
    got, expected = run(inputs, backend), oracle(inputs)
    assert_all_close(got[:4], expected[:4], rtol=2e-5, atol=1e-5 + 1e-7 * length)
    # The decay's gradient sums terms weighted by the distance, so that its rounding grows with the length.
    torch.testing.assert_close(got[4].double(), expected[4], rtol=2e-5, atol=1e-5 + 2e-7 * length)


@fused
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_storage(backend, dtype):
    inputs = make(queries=129, dtype=dtype, width=64)
    step = torch.finfo(dtype).eps
    got, expected = run(inputs, backend), oracle(inputs)
    assert_all_close(got[:4], expected[:4], rtol=2 * step, atol=2 * step)
    # The stored output is rounded, and the decay's gradient weighs that rounding with the distance (about 4 here).
    torch.testing.assert_close(got[4].double(), expected[4], rtol=4 * step, atol=16 * step)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("heads,key_heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_grouped_heads(backend, heads, key_heads):
    inputs = make(heads=heads, key_heads=key_heads, queries=70, dtype=torch.float32)
    repeated = [inputs[0], *(x.repeat_interleave(heads // key_heads, 1) for x in inputs[1:3]), inputs[3]]
    out = threshold_relative_attention(*(x.detach() for x in inputs), backend=backend)
    other = threshold_relative_attention(*(x.detach() for x in repeated), backend=backend)
    torch.testing.assert_close(out, other, rtol=1e-6, atol=1e-6)
    assert_all_close(run(inputs, backend), oracle(inputs), rtol=2e-5, atol=2e-5)


@fused
@pytest.mark.parametrize("queries,keys,start", [(1, 130, None), (7, 130, 100), (5, 200, 0), (64, 65, 1), (3, 128, 61)])
def test_fewer_queries_than_keys(backend, queries, keys, start):
    inputs = make(queries=queries, keys=keys, dtype=torch.float32)
    options = {"query_start": start}
    assert_all_close(run(inputs, backend, **options), oracle(inputs, **options), rtol=2e-5, atol=2e-5)


@fused
@pytest.mark.parametrize("side", ["left", "right", "middle", "all"])
def test_padding(backend, side):
    inputs = make(queries=100, dtype=torch.float32)
    real = torch.ones(2, 100, dtype=torch.bool)
    if side == "left":
        real[0, :70] = False
    elif side == "right":
        real[1, 30:] = False
    elif side == "middle":
        real[:, 20:90:3] = False
    else:
        real[0] = False
    options = {"key_padding_mask": real}
    got = run(inputs, backend, **options)
    assert_all_close(got, oracle(inputs, **options), rtol=2e-5, atol=2e-5)
    # Whatever stands in padded places, NaN included, cannot change anything.
    hole = ~real[:, None, :, None]
    poisoned = [inputs[0], *(torch.where(hole, torch.nan, x) for x in inputs[1:3]), inputs[3]]
    again = run(poisoned, backend, **options)
    for a, b in zip(got, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    if side == "all":
        assert not got[0][0].any() and not got[2][0].any() and not got[4][0].any()


@fused
def test_packing_equals_separate_sequences(backend):
    inputs = make(batch=1, queries=150, dtype=torch.float32)
    ends = [0, 1, 64, 64, 130, 150]
    packed = run(inputs, backend, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    assert_all_close(packed, oracle(inputs, cu_seqlens=torch.tensor(ends)), rtol=2e-5, atol=2e-5)
    for low, high in itertools.pairwise(ends):
        part = [x.detach()[:, :, low:high] for x in inputs]
        out = threshold_relative_attention(*part, backend=backend)
        torch.testing.assert_close(out, packed[0][:, :, low:high], rtol=1e-5, atol=1e-6)


@fused
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.5},
        {"exclude_self": True},
        {"exclude_self": torch.tensor([True, False, False, True])},
        {"scale": 0.7},
        {"score_bound": 4.0001},
        {"score_bound": torch.tensor([4.01, 4.02, 4.03, 4.04])},
        {"dropout_p": 0.4, "dropout_seed": 7},
        {"dropout_p": 0.1, "dropout_seed": -(2**40) - 3, "query_start": 20},
        {"threshold": torch.linspace(0, 1.5, 2 * 4 * 80).view(2, 4, 80)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(backend, options):
    inputs = make(queries=80, keys=100, dtype=torch.float32)
    assert_all_close(run(inputs, backend, **options), oracle(inputs, **options), rtol=2e-5, atol=2e-5)


@fused
def test_rows_that_keep_nothing(backend):
    q, k, v, g = make(queries=40, dtype=torch.float32, normed=False)
    q, k = q.detach().abs(), -k.detach().abs()
    got = run((q, k, v, g), backend)
    for name, x in zip(("out", "dq", "dk", "dv", "dlog_decay"), got, strict=True):
        assert not x.any(), name


@fused
def test_large_scores_take_no_harm(backend):
    """Without QK-norm, scores far beyond what exp can hold in fp32."""
    inputs = [x.detach() * (20.0 if n < 2 else 1.0) for n, x in enumerate(make(queries=70, dtype=torch.float32))]
    assert_all_close(run(inputs, backend), oracle(inputs), rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "log_decay"])
def test_non_finite_input_stays_in_its_rows(backend, which, value):
    inputs = [x.detach().clone() for x in make(batch=1, heads=2, key_heads=2, queries=80, dtype=torch.float32)]
    clean = threshold_relative_attention(*inputs, backend=backend)
    keep = threshold_keep(inputs)
    target = inputs[("q", "k", "v", "log_decay").index(which)]
    if which == "log_decay":
        target[0, 1, 30] = value
        if math.isinf(value):
            with pytest.raises(InputError, match="log_decay must"):
                threshold_relative_attention(*inputs, backend=backend)
            return
    else:
        target[0, 1, 30, 3] = value
    out = threshold_relative_attention(*inputs, backend=backend, tolerance=0.0)
    hit = torch.zeros(2, 80, dtype=torch.bool)
    if which in ("q", "log_decay"):
        hit[1, 30] = True
    elif which == "k":
        hit[1, 30:] = True
    else:
        hit[1] = keep[1, :, 30]
    assert not out[0][hit].isfinite().any()
    torch.testing.assert_close(out[0][~hit], clean[0][~hit], rtol=1e-5, atol=1e-6)


def threshold_keep(inputs):
    return attention_map(inputs[0], inputs[1], inputs[3]).keep[0]


@fused
def test_scores_planted_at_the_threshold(backend):
    """Exact scores of 0, or a hair to either side: all backends keep the same keys, in prefill and in decode."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, 2, 96, 16, generator=generator)
    q = torch.cat([half, half], -1)
    k = torch.cat([half.roll(1, 2), -half.roll(1, 2)], -1)  # dot products of 0 up to rounding
    k[..., 3] *= 1 + 2.0**-23
    v = torch.randn(1, 2, 96, 32, generator=generator)
    g = torch.full((1, 2, 96), -0.01)
    exact = torch.zeros(1, 2, 96, 96, dtype=torch.float64)
    for channel in range(32):
        exact += q[..., channel].double()[..., None] * k[..., channel].double()[..., None, :]
    keep = (exact > 0).tril()
    near = (exact.abs() < 1e-4).tril().sum()
    assert near >= 96  # the case is really hard
    stats = attention_stats(q, k, g, backend=backend, tolerance=0.0)
    assert torch.equal(stats.kept, keep.sum(-1).int())
    for i in (5, 50, 95):
        step = attention_stats(q[:, :, i : i + 1], k[:, :, : i + 1], g[:, :, i : i + 1], backend=backend, tolerance=0.0)
        assert torch.equal(step.kept, stats.kept[:, :, i : i + 1])
    assert_all_close(run((q, k, v, g), backend), run((q, k, v, g), "reference"), rtol=2e-4, atol=2e-4)
    for place in range(30, 42):  # a key that is not finite, side by side with those: rows before it do not see it
        dirty = k.clone()
        dirty[:, :, place] = torch.nan
        again = attention_stats(q, dirty, g, backend=backend, tolerance=0.0)
        assert torch.equal(again.kept[:, :, :place], stats.kept[:, :, :place])


@fused
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate(backend, p):
    """Weights are laid open: equal scores, no decay, and value j the j-th unit vector, so out[i, j] is the weight."""
    ones = torch.ones(4, 4, 64, 64)
    units = torch.eye(64).expand(4, 4, 64, 64)
    decay = torch.zeros(4, 4, 64)
    weights = threshold_relative_attention(ones, ones, units, decay, dropout_p=p, dropout_seed=11, backend=backend)
    seen = torch.ones(64, 64, dtype=torch.bool).tril().expand_as(weights)
    whole = 1.0 / torch.arange(1, 65).view(64, 1).expand_as(weights)
    alive = weights != 0
    assert not alive[~seen].any()
    torch.testing.assert_close(weights[alive], (whole / (1 - p))[alive], rtol=1e-5, atol=0.0)

    def close(alive, seen):  # the share that survives, within 5 standard deviations
        count = seen.sum()
        return abs(alive.sum() / count - (1 - p)) < 5 * math.sqrt(p * (1 - p) / count)

    assert close(alive, seen)
    for part in range(4):  # every batch entry and every head draws its own
        assert close(alive[part], seen[part]) and close(alive[:, part], seen[:, part])
    for column in range(0, 48, 8):
        assert close(alive[..., column], seen[..., column])
    assert not torch.equal(alive[0, 0], alive[0, 1]) and not torch.equal(alive[0, 0], alive[1, 0])
    both = alive[..., :-1] & alive[..., 1:] & seen[..., 1:]  # neighbours are independent
    pairs = seen[..., 1:].sum()
    assert abs(both.sum() / pairs - (1 - p) ** 2) < 5 * math.sqrt(0.25 / pairs)


@fused
def test_dropout_repeats_with_its_seed(backend):
    q, k, v, g = (x.detach() for x in make(queries=200, dtype=torch.float32))
    once = threshold_relative_attention(q, k, v, g, dropout_p=0.5, dropout_seed=1, backend=backend)
    same = threshold_relative_attention(q, k, v, g, dropout_p=0.5, dropout_seed=1, backend=backend)
    other = threshold_relative_attention(q, k, v, g, dropout_p=0.5, dropout_seed=2, backend=backend)
    assert torch.equal(once, same) and not torch.equal(once, other)
    torch.manual_seed(5)
    drawn = threshold_relative_attention(q, k, v, g, dropout_p=0.5, backend=backend)
    fresh = threshold_relative_attention(q, k, v, g, dropout_p=0.5, backend=backend)
    torch.manual_seed(5)
    again = threshold_relative_attention(q, k, v, g, dropout_p=0.5, backend=backend)
    assert torch.equal(drawn, again) and not torch.equal(drawn, fresh)


@fused
def test_static_cache_tail_is_never_read(backend):
    inputs = [x.detach().clone() for x in make(queries=5, keys=100, dtype=torch.float32)]
    short = [inputs[0], inputs[1][:, :, :65], inputs[2][:, :, :65], inputs[3]]
    expected = run(short, backend)
    inputs[1][:, :, 65:] = torch.nan
    inputs[2][:, :, 65:] = torch.inf
    got = run(inputs, backend, query_start=60)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[2][:, :, :65], expected[2], rtol=1e-6, atol=1e-6)
    assert not got[2][:, :, 65:].any() and not got[3][:, :, 65:].any()


BAD = {
    "q": lambda a: {**a, "q": a["q"][0]},
    "k": lambda a: {**a, "k": a["k"].double()},
    "v": lambda a: {**a, "v": a["v"][:, :, :-1]},
    "log_decay": lambda a: {**a, "log_decay": a["log_decay"][..., None]},
    "log_decay must be <= 0": lambda a: {**a, "log_decay": -a["log_decay"] + 1},
    "threshold": lambda a: {**a, "threshold": -1.0},
    "threshold must be a float or": lambda a: {**a, "threshold": torch.zeros(3)},
    "threshold must be >= 0 everywhere": lambda a: {**a, "threshold": -torch.ones_like(a["log_decay"])},
    "exclude_self": lambda a: {**a, "exclude_self": torch.zeros(7, dtype=torch.bool)},
    "dropout_p": lambda a: {**a, "dropout_p": 1.0},
    "dropout_seed": lambda a: {**a, "dropout_p": 0.1, "dropout_seed": torch.zeros(2)},
    "key_padding_mask": lambda a: {**a, "key_padding_mask": torch.ones(2, 8)},
    "cu_seqlens packs": lambda a: {**a, "cu_seqlens": torch.tensor([0, 8])},
    "query_start": lambda a: {**a, "query_start": 3},
    "score_bound": lambda a: {**a, "score_bound": -1.0},
    "tolerance": lambda a: {**a, "tolerance": 2.0},
    "scale": lambda a: {**a, "scale": 0.0},
    "heads": lambda a: {**a, "q": a["q"][:, :3], "log_decay": a["log_decay"][:, :3]},
    "q must be a dense tensor, not a sparse_coo one": lambda a: {**a, "q": a["q"].to_sparse()},
    "k must be a dense tensor, not a nested one": lambda a: {**a, "k": torch.nested.nested_tensor(list(a["k"]))},
    "log_decay must be a tensor, not list": lambda a: {**a, "log_decay": a["log_decay"].tolist()},
    "log_decay must not be -inf": lambda a: {**a, "log_decay": a["log_decay"] - torch.inf},
    "threshold must be >= 0 everywhere, and not NaN": lambda a: {**a, "threshold": a["log_decay"] * torch.nan},
    "threshold must be a number, not str": lambda a: {**a, "threshold": "0"},
    "threshold must be a number >= 0": lambda a: {**a, "threshold": float("nan")},
    "exclude_self must be a bool or a bool tensor [4], not list": lambda a: {**a, "exclude_self": [True] * 4},
    "key_padding_mask must be a tensor, not list": lambda a: {**a, "key_padding_mask": [[True] * 8] * 2},
    "cu_seqlens must be a tensor, not list": lambda a: {**a, "cu_seqlens": [0, 8]},
    "query_start must be an int, not float": lambda a: {**a, "query_start": 0.0},
    "score_bound must be a number, not str": lambda a: {**a, "score_bound": "4"},
    "score_bound must be >= 0, not nan": lambda a: {**a, "score_bound": float("nan")},
    "score_bound must be a float or [4]": lambda a: {**a, "score_bound": torch.ones(3)},
    "tolerance must be a number, not NoneType": lambda a: {**a, "tolerance": None},
    "scale must be a number, not list": lambda a: {**a, "scale": [1.0]},
    "dropout_p must be a number, not str": lambda a: {**a, "dropout_p": "0.1"},
    "dropout_seed must be an int or one int64, not float": lambda a: {**a, "dropout_p": 0.1, "dropout_seed": 0.5},
    "surrogate_width must be a number, not str": lambda a: {**a, "surrogate_width": "0.5"},
    "key_index must be a KeyIndex, not int": lambda a: {**a, "key_index": 3},
    "unknown option 'treshold'; did you mean 'threshold'": lambda a: {**a, "treshold": 0.1},
    "unknown backend '3'": lambda a: {**a, "backend": 3},
    "unknown backend 'blokwise'; did you mean 'blockwise'": lambda a: {**a, "backend": "blokwise"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message):
    q, k, v, g = (x.detach() for x in make(queries=8, dtype=torch.float32))
    arguments = BAD[message]({"q": q, "k": k, "v": v, "log_decay": g})
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        threshold_relative_attention(**arguments)
    assert "\n" not in str(caught.value)


def test_packed_ends_are_checked():
    q, k, v, g = (x.detach() for x in make(batch=1, queries=8, dtype=torch.float32))
    for ends in ([0, 5], [1, 8], [0, 6, 4, 8]):
        with pytest.raises(InputError, match="cu_seqlens must rise"):
            threshold_relative_attention(q, k, v, g, cu_seqlens=torch.tensor(ends))


def test_no_option_is_accepted_and_ignored():
    q, k, _, g = (x.detach() for x in make(queries=8, dtype=torch.float32))
    with pytest.raises(InputError, match="unknown option 'tolerance'"):
        attention_map(q, k, g, tolerance=0.0)
    with pytest.raises(InputError, match="unknown option 'dropout_p'"):
        attention_stats(q, k, g, dropout_p=0.1)


def test_every_option_is_described():
    for name in AttentionOptions.__annotations__:
        assert f"\n    {name} " in threshold_relative_attention.__doc__
