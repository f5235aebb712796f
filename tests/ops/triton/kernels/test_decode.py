"""Few queries against a long cache: split keys, the key index, and the same answer as one long forward."""

import pytest
import torch

from tests.ops.cases import make
from traformer.ops import KeyIndex, attention_map, attention_stats, threshold_relative_attention
from traformer.ops.threshold_relative.triton import decode_kernels

slow = pytest.mark.slow


@pytest.fixture
def short_splits(monkeypatch):
    """Several splits within few keys."""
    monkeypatch.setattr(decode_kernels, "NEAR_KEYS", 64)
    monkeypatch.setattr(decode_kernels, "SPLIT_KEYS", 64)


def problem(device, **options):
    return [x.detach().to(device) for x in make(**({"batch": 1, "dtype": torch.float32, "width": 16} | options))]


def check(inputs, atol=2e-5, **options):
    got = threshold_relative_attention(*inputs, backend="triton", **options)
    options.pop("key_index", None)
    expected = threshold_relative_attention(*(x.double() for x in inputs), backend="reference", **options)
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("decay", ["long", pytest.param("init", marks=slow), pytest.param("zero", marks=slow)])
def test_splits_join_exactly(device, short_splits, decay):
    inputs = problem(device, heads=4, key_heads=2, queries=2, keys=300, decay=decay)
    check(inputs, query_start=290, exclude_self=torch.tensor([True, False, False, True], device=device))
    stats = attention_stats(inputs[0], inputs[1], inputs[3], backend="triton", tolerance=0.0)
    assert torch.equal(stats.kept, attention_map(inputs[0], inputs[1], inputs[3]).keep.sum(-1).int())
    assert (stats.read == torch.tensor([299, 300], device=device)).all()


@slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_storage(device, short_splits, dtype):
    inputs = problem(device, heads=4, key_heads=1, queries=1, keys=200, dtype=dtype, width=64, decay="long")
    check(inputs, atol=2 * torch.finfo(dtype).eps)


def test_a_settled_head_reads_no_farther(device, short_splits):
    """What lies beyond the nearest keys is not read at all: it may hold anything."""
    q, k, v, g = problem(device, heads=2, key_heads=1, queries=1, keys=300, decay="steep")
    expected = threshold_relative_attention(q, k, v, g, backend="triton", score_bound=4.01)
    k[:, :, :200], v[:, :, :200] = torch.nan, torch.nan
    got = threshold_relative_attention(q, k, v, g, backend="triton", score_bound=4.01)
    assert torch.equal(got, expected)
    stats = attention_stats(q, k, g, backend="triton", score_bound=4.01)
    assert (stats.read <= 64).all()


def test_key_index(device, short_splits):
    """Blocks that no query can keep a key of are passed over: what they hold cannot matter, the answer is the same."""
    q, k, v, g = problem(device, heads=2, key_heads=1, queries=1, keys=300, decay="long")
    q, k = q.abs(), k.abs()
    k[:, :, 64:192] *= -1
    index = KeyIndex()
    index.append(k[:, :, :130])
    index.append(k[:, :, 130:])
    check((q, k, v, g), key_index=index)
    full = threshold_relative_attention(q, k, v, g, backend="triton", key_index=index)
    v[:, :, 64:192] = torch.nan
    k[:, :, 64:192] = torch.nan
    assert torch.equal(threshold_relative_attention(q, k, v, g, backend="triton", key_index=index), full)


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": torch.tensor([[[0.3]], [[0.0]]]).expand(2, 2, 1).contiguous()},
        {"key_padding_mask": torch.arange(200)[None] > torch.tensor([[20], [130]])},
        {"dropout_p": 0.4, "dropout_seed": 5},
        {"score_bound": 4.01, "tolerance": 0.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(device, short_splits, options):
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    check(problem(device, batch=2, heads=2, key_heads=2, queries=1, keys=200, decay="long"), **options)


@slow
@pytest.mark.parametrize(
    "which,value", [("q", torch.nan), ("k", torch.inf), ("v", torch.nan), ("log_decay", torch.nan)]
)
def test_what_is_not_finite(device, short_splits, which, value):
    inputs = problem(device, heads=2, key_heads=2, queries=1, keys=200, decay="long")
    place = (0, 1, 0) if which == "log_decay" else (0, 1, 0 if which == "q" else 40, 3)
    inputs[("q", "k", "v", "log_decay").index(which)][place] = value
    got = threshold_relative_attention(*inputs, backend="triton", tolerance=0.0)
    expected = threshold_relative_attention(*inputs, backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@slow
def test_one_query_after_another_equals_one_forward(device):
    q, k, v, g = problem(device, heads=2, key_heads=1, queries=40)
    whole = threshold_relative_attention(q, k, v, g, backend="triton")
    for i in range(0, 40, 7):
        step = slice(i, i + 1)
        one = threshold_relative_attention(
            q[:, :, step], k[:, :, : i + 1], v[:, :, : i + 1], g[:, :, step], backend="triton"
        )
        torch.testing.assert_close(one, whole[:, :, step], rtol=1e-5, atol=1e-5)
