"""The surrogate gradient of the choice of keys: a loop written from its definition, then every backend against that."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import DECAYS, DOUBLE, FUSED, HERE, make
from traformer.errors import InputError
from traformer.ops import attention_map, attention_stats, threshold_relative_attention

NAMES = ("out", "dq", "dk", "dv", "dlog_decay", "dthreshold")


def by_hand(q, k, v, log_decay, threshold, width):
    """One head, one query after another: hard choice forward, sigmoid backward."""
    rows = []
    for i in range(q.shape[0]):
        scores = [q[i] @ k[j] / q.shape[1] ** 0.5 for j in range(i + 1)]
        kept = [bool(s > threshold[i]) for s in scores]
        if not any(kept):
            rows.append(torch.zeros_like(q[i]))
            continue
        mass = []
        for j, score in enumerate(scores):
            distance = 1 + sum(kept[j + 1 :])
            soft = torch.sigmoid((score - threshold[i]) / width)
            mass.append(torch.exp(score + log_decay[i] * distance) * (kept[j] + soft - soft.detach()))
        rows.append(sum(m / sum(mass) * v[j] for j, m in enumerate(mass)))
    return torch.stack(rows)


def run(inputs, threshold, backend, dtype, **options):
    """out and five gradients (four without a threshold); inputs and threshold as given, rounded to dtype."""
    leaves = [x.detach().to(dtype).clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    if threshold is not None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves.append(threshold.detach().to(wide).clone().requires_grad_())
        options["threshold"] = leaves[4]
    out = threshold_relative_attention(*leaves[:4], backend=backend, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return (out.detach(), *torch.autograd.grad(out, leaves, upstream))


def problem(**options):
    """Inputs that are the same in single and in double precision, and a threshold for each query."""
    inputs = [x.detach().float().double() for x in make(**options)]
    threshold = torch.rand(inputs[3].shape, generator=torch.Generator().manual_seed(3)) * 0.3
    return inputs, threshold.double()


@pytest.mark.parametrize("backend", DOUBLE)
@pytest.mark.parametrize("width", [0.2, 0.5])
def test_against_loops(backend, width):
    inputs, threshold = problem(batch=1, heads=2, key_heads=2, queries=13, width=8)
    got = run(inputs, threshold, backend, torch.float64, surrogate_width=width, tolerance=0.0)
    leaves = [x.clone().requires_grad_() for x in (*inputs, threshold)]
    heads = [by_hand(*(x[0, h] for x in leaves), width) for h in range(2)]
    out = torch.stack(heads)[None]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    expected = (out.detach(), *torch.autograd.grad(out, leaves, upstream))
    for name, a, b in zip(NAMES, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


OPTIONS = {
    "plain": {},
    "own key": {"exclude_self": torch.tensor([True, False, False, True])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "padding": {"key_padding_mask": torch.arange(150) % 7 > 0},
    "packed": {"cu_seqlens": torch.tensor([0, 40, 41, 150])},
    "no early exit": {"tolerance": 0.0},
}


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_backends_agree(backend, decay, options):
    batch = 1 if "cu_seqlens" in options else 2
    if "key_padding_mask" in options:
        options = {"key_padding_mask": options["key_padding_mask"].expand(batch, -1)}
    inputs, threshold = problem(batch=batch, queries=150, width=16, decay=decay)
    expected = run(inputs, threshold, "reference", torch.float64, surrogate_width=0.5, **options)
    single = backend not in DOUBLE
    got = run(inputs, threshold, backend, torch.float32 if single else torch.float64, surrogate_width=0.5, **options)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(
            a.double(), b, rtol=1e-4 if single else 1e-6, atol=(2e-5 if single else 1e-6) * scale,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip


@pytest.mark.parametrize("backend", HERE)
def test_only_the_gradient_changes(backend):
    inputs, threshold = problem(queries=70, width=16)
    dtype = torch.float32
    hard = run(inputs, threshold, backend, dtype, surrogate_width=0.5)
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = threshold_relative_attention(*leaves, threshold=threshold.float().requires_grad_(), backend=backend)
    torch.testing.assert_close(hard[0], out.detach(), rtol=1e-6, atol=1e-6)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    own = torch.autograd.grad(out, leaves, upstream)
    torch.testing.assert_close(hard[3], own[2], rtol=1e-4, atol=1e-5)  # dv: weights are the same
    torch.testing.assert_close(hard[4], own[3], rtol=1e-4, atol=1e-4)
    for a, b in ((hard[1], own[0]), (hard[2], own[1])):
        assert (a - b).abs().max() > 0.01 * b.abs().max()
    assert hard[5].abs().max() > 0


@pytest.mark.parametrize("backend", FUSED)
def test_the_early_exit_stays(backend):
    """Removed keys do not keep a row reading: what is far in kept keys is still not read."""
    q, k, v, log_decay = (x.float() for x in problem(batch=1, heads=1, key_heads=1, queries=3000, width=64)[0])
    leaves = [x.clone().requires_grad_() for x in (q, k, v, log_decay)]
    out = threshold_relative_attention(*leaves, score_bound=8.001, surrogate_width=0.5, backend=backend)
    reach = out.grad_fn.saved_tensors[2]
    read = (torch.arange(3000) + 1 - reach).double().mean()
    plain = attention_stats(q, k, log_decay, score_bound=8.001, needs_grad=True, backend=backend).read.double().mean()
    assert plain <= read < (1.5 if backend == "triton" else 1.02) * plain < 3000 / 2


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "dropout_seed": 3}], ids=["plain", "dropout"])
@pytest.mark.parametrize("decay", ["long", "steep"])  # steep: weights underflow, which hides nothing
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["value", "key", "both"])
@pytest.mark.parametrize("width", [None, 0.5])
def test_what_a_key_that_is_not_finite_touches(backend, width, what, value, decay, options):
    """The law that reference.py states, element by element; nothing else changes."""
    inputs, threshold = problem(batch=1, heads=1, key_heads=1, queries=40, width=16, decay=decay)
    options = {**options, "surrogate_width": width, "tolerance": 0.0}
    gradients = (0, 1, 2, 3, 4) if width is None else (0, 1, 2, 3, 4, 5)

    def solve():
        results = run(inputs, threshold if width else None, backend, torch.float32, **options)
        return [results[n][0, 0].reshape(40, -1) for n in gradients]

    clean = solve()
    keep = attention_map(inputs[0], inputs[1], inputs[3], threshold=threshold if width else 0.0).keep[0, 0]
    if what != "value":
        inputs[1][0, 0, 20, 5] = value
    if what != "key":
        inputs[2][0, 0, 20, 3] = value
    sees = torch.arange(40) >= 20
    bad = keep[:, 20] if what == "value" else sees
    keep[bad, 20] = True  # a key that is not finite counts as kept
    reading = bad | (sees & keep.any(-1)) if width else bad
    visible = torch.ones(40, 40, dtype=torch.bool).tril()
    kept, pulled = (keep & bad[:, None]).any(0), ((visible if width else keep) & bad[:, None]).any(0)  # keys
    pulled[20] |= reading.any()
    expected = [bad, reading, pulled, kept, bad, reading]
    assert bad.any() and not bad.all() and (what != "value" or (sees & ~bad & keep.any(-1)).any())
    for name, is_nan, after, before in zip(NAMES, expected, solve(), clean, strict=False):
        assert torch.equal(after.isnan().all(-1), is_nan), name
        torch.testing.assert_close(after[~is_nan], before[~is_nan], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_width(width):
    with pytest.raises(InputError, match="surrogate_width must be a positive number"):
        threshold_relative_attention(*make(queries=3), surrogate_width=width)
