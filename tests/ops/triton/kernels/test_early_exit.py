"""The early exit: no error above its bound, fewer keys read than there are, all of them at tolerance 0."""

import pytest
import torch

from tests.ops.cases import make
from traformer.ops import attention_map, attention_stats, threshold_relative_attention

slow = pytest.mark.slow


def problem(device, **options):
    options = {"batch": 1, "heads": 1, "key_heads": 1, "width": 16, "dtype": torch.float32} | options
    return [x.detach().to(device) for x in make(**options)]


@pytest.mark.parametrize("decay,tolerance", [("init", 1e-3), *(
    pytest.param(decay, tolerance, marks=slow)
    for decay in ("init", "long", "steep", "tiny") for tolerance in (0.1, 2**-24)
)])  # fmt: skip
def test_error_is_within_its_bound(device, decay, tolerance):
    q, k, v, g = problem(device, queries=300, decay=decay)
    out = threshold_relative_attention(q, k, v, g, tolerance=tolerance, score_bound=4.001, backend="triton")
    full = threshold_relative_attention(*(x.double() for x in (q, k, v, g)), backend="reference")
    assert (out - full).abs().max() <= 2 * tolerance * v.abs().max() + 2e-6


def test_it_reads_what_the_bound_requires(device):
    """As blockwise does, whose rows and keys come in blocks of 64: a row that decays fast does not read them all."""
    q, k, _, g = problem(device, queries=300, decay="steep")
    read = attention_stats(q, k, g, score_bound=4.001, backend="triton").read
    other = attention_stats(q, k, g, score_bound=4.001, backend="blockwise").read
    assert read[..., -1] < 150 and (read <= other + 64).all()


def test_tolerance_zero_reads_every_key(device):
    q, k, _, g = problem(device, queries=130, decay="steep")
    stats = attention_stats(q, k, g, tolerance=0.0, backend="triton")
    assert torch.equal(stats.read[0, 0].cpu(), (torch.arange(130) + 1).int())
    assert torch.equal(stats.kept, attention_map(q, k, g).keep.sum(-1).int())


@slow
def test_gradient_error_is_of_the_order_of_the_tolerance(device):
    inputs = [x.requires_grad_() for x in problem(device, queries=300)]

    def gradients(tolerance):
        out = threshold_relative_attention(*inputs, tolerance=tolerance, score_bound=4.001, backend="triton")
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
        return torch.autograd.grad(out, inputs, upstream), upstream

    tolerance = 1e-4
    (loose, upstream), (full, _) = gradients(tolerance), gradients(0.0)
    mass = float(upstream.abs().sum(-1).sum(-1).max())
    for a, b in zip(loose, full, strict=True):
        assert (a - b).abs().max() <= tolerance * mass
    assert (loose[3] - full[3]).abs().max() <= 50 * tolerance


@slow
def test_memory_grows_with_the_length_not_its_square(device):
    """The largest tensor that forward and backward make, inputs and outputs included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.numel())
            return result

    length = 1500
    inputs = [x.requires_grad_() for x in problem(device, queries=length, decay="steep")]
    with Largest() as largest:
        threshold_relative_attention(*inputs, score_bound=4.001, backend="triton").sum().backward()
    assert largest.elements <= 32 * length  # the counts at the strips' edges, or a tensor of the inputs' size
