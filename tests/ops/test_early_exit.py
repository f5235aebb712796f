"""The early exit: no error above its bound, no key read that the bound does not ask for, no quadratic memory."""

import math

import pytest
import torch

from tests.ops.cases import FUSED, finest_dtype, make
from traformer.ops import attention_map, attention_stats, threshold_relative_attention
from traformer.ops.threshold_relative import blockwise
from traformer.ops.threshold_relative.bounds import log_tail


def required_reach(q, k, g, tolerance, needs_grad, bound):
    """Per row in fp64: the leftmost key that must be read if the row may stop after any key."""
    scores, keep, distance, _ = attention_map(q.double(), k.double(), g.double())
    length = q.shape[2]
    weights = torch.where(keep, torch.exp(scores + g.double()[..., None] * (distance - 1)), 0)
    read = weights.flip(-1).cumsum(-1).flip(-1)  # weight of keys j..i
    kept = keep.flip(-1).cumsum(-1).flip(-1)
    unread = torch.arange(length).expand_as(kept)  # keys left of j
    tail = log_tail(torch.tensor(bound, dtype=torch.float64), g.double()[..., None], kept, unread, needs_grad)
    stop = (unread == 0) | ((kept > 0) & (tail <= math.log(tolerance) + torch.log(read)))
    stop &= torch.ones(length, length, dtype=torch.bool).tril()
    last = torch.where(stop, unread, -1).amax(-1)  # largest j at which the row may stop
    return last  # [B, H, T]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_blockwise_reads_no_more_than_the_bound_requires(needs_grad):
    q, k, _, g = (x.detach() for x in make(batch=1, heads=2, key_heads=2, queries=2000, width=64, dtype=torch.float32))
    tolerance, bound = 2**-24, 8.0
    stats = attention_stats(q, k, g, score_bound=bound, tolerance=tolerance, needs_grad=needs_grad, backend="blockwise")
    reach = torch.arange(2000) + 1 - stats.read
    need = required_reach(q, k, g, tolerance, needs_grad, bound)
    rows, keys = blockwise.ROWS, blockwise.KEYS
    for start in range(0, 2000, rows):
        block = slice(start, min(start + rows, 2000))
        slowest = need[..., block].amin(-1)  # the block ends with its slowest row, at a key block's edge
        assert torch.equal(reach[..., block.start].long(), (slowest // keys) * keys)
    assert stats.read.float().mean() < 800


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("tolerance", [0.1, 1e-3, 2**-24])
@pytest.mark.parametrize("decay", ["init", "long", "steep", "tiny", "zero"])
def test_error_is_within_its_bound(backend, tolerance, decay):
    dtype = finest_dtype(backend)
    q, k, v, g = (x.detach() for x in make(queries=400, width=32, decay=decay, dtype=dtype))
    out = threshold_relative_attention(q, k, v, g, tolerance=tolerance, backend=backend)
    full = threshold_relative_attention(*(x.double() for x in (q, k, v, g)), backend="reference")
    rounding = 2e-6 if dtype == torch.float32 else 1e-12
    assert (out - full).abs().max() <= 2 * tolerance * v.abs().max() + rounding


@pytest.mark.parametrize("backend", FUSED)
def test_tolerance_zero_reads_every_key(backend):
    q, k, _, g = (x.detach() for x in make(queries=300, decay="steep", dtype=torch.float32))
    stats = attention_stats(q, k, g, tolerance=0.0, backend=backend)
    assert torch.equal(stats.read, (torch.arange(300) + 1).int().expand_as(stats.read))
    assert torch.equal(stats.kept, attention_map(q, k, g).keep.sum(-1).int())


@pytest.mark.parametrize("backend", FUSED)
def test_gradient_error_is_of_the_order_of_the_tolerance(backend):
    dtype = finest_dtype(backend)
    inputs = make(queries=500, width=32, dtype=dtype)

    def gradients(tolerance):
        out = threshold_relative_attention(*inputs, tolerance=tolerance, backend=backend)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return torch.autograd.grad(out, inputs, upstream.to(dtype)), upstream

    tolerance = 1e-4
    (loose, upstream), (full, _) = gradients(tolerance), gradients(0.0)
    mass = float(upstream.abs().sum(-1).sum(-1).max())  # what many rows together may drop from one key
    for a, b in zip(loose, full, strict=True):
        assert (a - b).abs().max() <= tolerance * mass
    assert (loose[3] - full[3]).abs().max() <= 50 * tolerance


@pytest.mark.parametrize("backend", FUSED)
def test_no_quadratic_memory(backend):
    """The largest tensor made in forward and backward is far below T x T."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.numel())
            return result

    length = 12_000
    inputs = make(batch=1, heads=1, key_heads=1, queries=length, width=8, dtype=torch.float32)
    with Largest() as largest:
        threshold_relative_attention(*inputs, backend=backend).sum().backward()
    assert length * 8 <= largest.elements <= blockwise.CHUNK_ELEMENTS < length * length / 30


@pytest.mark.parametrize("backend", FUSED)
def test_reading_stops_growing_with_length(backend):
    reads = []
    for length in (1500, 4000):
        q, k, _, g = (x.detach() for x in make(batch=1, queries=length, width=64, dtype=torch.float32))
        reads.append(attention_stats(q, k, g, score_bound=8.0, backend=backend).read[..., -200:].float().mean())
    assert reads[1] < 1.5 * reads[0]


@pytest.mark.parametrize("decay", [-3.0, -0.2, -1e-3, 0.0])
@pytest.mark.parametrize(("width", "threshold"), [(0.05, 0.0), (0.5, 0.0), (0.5, 1.5), (4.0, 0.3)])
def test_a_surrogates_bound_holds_wherever_a_row_stops(width, threshold, decay):
    """Every unread key's share of the gradients, kept or removed, summed in fp64 for every row and every place."""
    length, bound = 150, 8.0
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(length, length, generator=generator, dtype=torch.float64)
    scores[:, ::3] = threshold  # removed, and as heavy as a removed key can be
    scores[:, 1::17] = bound  # kept, and as heavy as the caller says that any can be
    keep = (scores > threshold).tril()
    nearer = keep.flip(-1).cumsum(-1).flip(-1) - keep.long()  # kept keys to the right of each
    if_kept = torch.exp(scores + decay * nearer).tril()
    soft = torch.sigmoid((scores - threshold) / width)
    parts = keep * if_kept * (nearer + 1) + if_kept * soft * (1 - soft) / width
    unread = parts.cumsum(-1)  # of keys up to j
    kept_right, remaining = nearer, torch.arange(1, length + 1).expand(length, length)
    upper = torch.tensor(bound, dtype=torch.float64)
    rate = torch.tensor(decay, dtype=torch.float64)
    tail = log_tail(upper, rate, kept_right, remaining, True, surrogate_width=width, threshold=threshold).exp()
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    assert (unread <= tail * (1 + 1e-12))[seen].all()
    plain = log_tail(upper, rate, kept_right, remaining, True).exp()
    assert (tail >= plain)[seen].all()  # and is never looser than each removed key at the largest score
    assert (tail <= plain + torch.exp(upper + rate * kept_right) * remaining / (2 * width) * (1 + 1e-12))[seen].all()
