"""Drawn problems, and what must hold for each of them: shared by test_properties.py and the fuzz campaign.

A problem is described by hypothesis and filled by numpy, whose normal numbers are the same on every machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from traformer.ops import KeyIndex, attention_map, attention_stats, threshold_relative_attention
from traformer.ops.threshold_relative import cpu, reference
from traformer.ops.threshold_relative.options import make_problem

NAMES = ("out", "dq", "dk", "dv", "dlog_decay", "dthreshold")
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


class Drawn:
    """One problem: q, k, v, log_decay in fp32, options of the operator, the number of threads to solve it with."""

    def __init__(self, inputs: list[Tensor], options: dict[str, Any], threads: int, upstream: Tensor):
        self.inputs, self.options, self.threads, self.upstream = inputs, options, threads, upstream

    def __repr__(self) -> str:
        names = ("q", "k", "v", "log_decay")
        text = ", ".join(f"{name} {_short(x)}" for name, x in zip(names, self.inputs, strict=True))
        options = ", ".join(f"{k}={_short(v) if isinstance(v, Tensor) else v}" for k, v in self.options.items())
        return f"<{text}; {options}; {self.threads} threads>"


def _short(x: Tensor) -> str:
    """Shape, the first numbers, and where x is not finite."""
    bad = [] if x.dtype == torch.bool else (~x.isfinite()).nonzero().tolist()
    first = " ".join(f"{value:.6g}" for value in x.flatten()[:4].tolist())
    return f"{list(x.shape)} {first} ..." + (f" not finite at {bad[:3]}" if bad else "")


def variants(backend: str) -> list[str]:
    """Ways to run a backend: the compiled one has one per instruction set that this machine has."""
    if backend == "cpu":
        return [f"cpu:{name}" for name, usable in cpu.instruction_sets().items() if usable]
    return [backend]


@contextlib.contextmanager
def running(variant: str, threads: int) -> Iterator[str]:
    """The backend's name, with its instruction set and number of threads in force."""
    backend, _, isa = variant.partition(":")
    before, forced = torch.get_num_threads(), os.environ.get(cpu.ISA_VARIABLE)
    if isa:
        os.environ[cpu.ISA_VARIABLE] = isa
    torch.set_num_threads(threads)
    try:
        yield backend
    finally:
        torch.set_num_threads(before)
        if isa:
            os.environ.pop(cpu.ISA_VARIABLE)
            if forced is not None:
                os.environ[cpu.ISA_VARIABLE] = forced


def _normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)


@st.composite
def problems(draw: st.DrawFn, longest: int = 200) -> Drawn:
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    packed = draw(st.booleans())
    batch = 1 if packed else draw(st.integers(1, 2))
    key_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    heads = key_heads * group
    width = draw(st.sampled_from([8, 16, 24, 32, 64, 72, 128, 136]))
    queries = draw(st.one_of(st.integers(1, 9), st.integers(10, longest)))
    keys = queries + draw(st.one_of(st.just(0), st.integers(0, 150)))
    start = keys - queries if draw(st.booleans()) else draw(st.integers(0, keys - queries))
    lean = draw(st.sampled_from([0.0, -0.3, 0.3, -4.0, 4.0]))  # keep half ... none, all

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))

    q = tensor(_normed(normal(batch, queries, heads, width) + abs(lean)))
    k = tensor(_normed(normal(batch, keys, key_heads, width) + lean))
    v = tensor(normal(batch, keys, key_heads, width))
    if draw(st.booleans()):  # scores within rounding of 0: keys orthogonal to some query but for the last bits
        for j in range(0, keys, 3):
            source = q[:, j % queries, ::group].unflatten(-1, (-1, 2))
            k[:, j] = torch.stack([-source[..., 1], source[..., 0]], -1).flatten(-2)
            if j % 2:
                k[:, j, :, 0] = torch.nextafter(k[:, j, :, 0], torch.tensor(torch.inf))
    q *= draw(st.sampled_from([1.0, 1.0, 1.0, 0.01, 12.0]))  # the last: scores beyond what exp holds in fp32
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if draw(st.booleans()):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

    shape = (batch, heads, queries)
    decay = draw(st.sampled_from([0.0, -1e-8, -1e-4, -0.7, -100.0, "init", "long"]))
    if isinstance(decay, float):
        log_decay = torch.full(shape, decay)
    else:
        log_decay = tensor(-np.logaddexp(0.0, -(normal(*shape) + (6.0 if decay == "long" else 0.0))))

    options: dict[str, Any] = {"tolerance": draw(st.sampled_from([0.0, 2**-24])), "query_start": start}
    if packed:
        cuts = draw(st.lists(st.integers(0, keys), max_size=4))
        options["cu_seqlens"] = torch.tensor([0, *sorted(cuts), keys])
    padding = draw(st.sampled_from(["none", "left", "right", "any"]))
    if padding != "none":
        position = torch.arange(keys)
        cut = torch.from_numpy(random.integers(0, keys, (batch, 1)))
        options["key_padding_mask"] = {
            "left": position >= cut, "right": position <= cut,
            "any": torch.from_numpy(random.random((batch, keys)) > 0.4),
        }[padding]  # fmt: skip
    own = draw(st.sampled_from(["no", "all", "some"]))
    if own != "no":
        options["exclude_self"] = True if own == "all" else torch.arange(heads) % 2 == 0
    limit = draw(st.sampled_from(["zero", "one", "adaptive"]))
    if limit != "zero":
        options["threshold"] = 1.0 if limit == "one" else tensor(random.random(shape))
    if draw(st.booleans()):
        options["surrogate_width"] = draw(st.sampled_from([0.1, 0.5]))
    threads = draw(st.sampled_from([1, 2, 4]))
    return Drawn([q, k, v, log_decay], options, threads, tensor(normal(batch, heads, queries, width)))


@st.composite
def not_finite_problems(draw: st.DrawFn, longest: int = 200) -> tuple[Drawn, Drawn, Tensor]:
    """A clean problem, the same with one to three elements that are not finite, and which keys were touched."""
    clean = draw(problems(longest))
    clean.options["tolerance"] = 0.0  # else what is read at all depends on the backend's blocks
    dirty = [x.clone(memory_format=torch.preserve_format) for x in clean.inputs]
    for _ in range(draw(st.integers(1, 3))):
        which = draw(st.integers(0, 3))
        value = float("nan") if which == 3 else draw(st.sampled_from(NOT_FINITE))
        place = draw(st.integers(0, 10**6)) % dirty[which].numel()
        dirty[which][tuple(torch.unravel_index(torch.tensor(place), dirty[which].shape))] = value
    bad_value = ~dirty[2].isfinite().all(-1)
    return clean, Drawn(dirty, clean.options, clean.threads, clean.upstream), bad_value


def solve(problem: Drawn, backend: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """out and the gradient of every input, that of an adaptive threshold included where it has one."""
    leaves = [x.to(dtype).clone(memory_format=torch.preserve_format).requires_grad_() for x in problem.inputs]
    options = {**problem.options, **options}
    threshold = options.get("threshold")
    if isinstance(threshold, Tensor) and options.get("surrogate_width"):
        leaves.append(threshold.to(torch.promote_types(dtype, torch.float32)).requires_grad_())
        options["threshold"] = leaves[-1]
    out = threshold_relative_attention(*leaves[:4], backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.upstream.to(dtype))]


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _longest(x: Tensor) -> float:
    return float(x.float().norm(dim=-1).max())


def _steepness(problem: Drawn) -> float:
    """How far scores, and with them their error, go beyond those of normed inputs."""
    q, k = problem.inputs[:2]
    return max(1.0, _longest(q) * _longest(k) / q.shape[3])


def _rounding(problem: Drawn) -> dict[str, float]:
    """What rounding may leave in each result even where the result itself vanishes: that of dO . v, multiplied on."""
    q, k, v, _ = problem.inputs
    scale = q.shape[3] ** -0.5
    unit = 2**-24 * _longest(problem.upstream) * _longest(v) * _steepness(problem)
    surrogate = 2 * _surrogate_gain(problem)  # dO . v and delta are both rounded
    sizes = {
        "dq": unit * max(1.0, scale * _longest(k)) * (1 + surrogate),
        "dk": unit * max(1.0, scale * _longest(q)) * q.shape[2] ** 0.5 * (1 + surrogate),
        "dlog_decay": unit * k.shape[2] ** 0.5,
        "dthreshold": unit * surrogate,
    }
    return {name: 1e-6 + sizes.get(name, unit) for name in NAMES}


def _surrogate_gain(problem: Drawn) -> float:
    """By how much a surrogate multiplies an error of dO . v - delta: the largest sum of its factors in a row.

    Row i's gradient is sum_j m_ij sigmoid'((s_ij - threshold) / width) / width (dO . v_j - delta), m_ij the weight that
    key j has or, were it kept, would have. Where one key has all the weight, dO . v - delta is 0 but for rounding,
    and 1 / (4 width) of that remains; keys removed to the right of all kept ones have a weight of up to 1 each.
    """
    normal = make_problem(*(x.double() for x in problem.inputs), problem.options)
    width = normal.surrogate_width
    if not width:
        return 0.0
    scores, keep, _, _ = reference.attention_map(normal)  # [B, H, T, S]
    nearer = keep.flip(-1).cumsum(-1).flip(-1) - keep.long()
    logits = scores + normal.log_decay[..., None] * nearer
    row = torch.where(keep, logits, -torch.inf).logsumexp(-1, keepdim=True)
    mass = torch.where(reference.visibility(normal) & row.isfinite(), torch.exp(logits - row), 0.0)
    threshold = normal.threshold_value if normal.threshold is None else normal.threshold[..., None]
    soft = torch.sigmoid((scores - threshold) / width)
    return _largest((mass * soft * (1 - soft) / width).sum(-1))


def check_formula(problem: Drawn, chosen: list[str]) -> None:
    """Output, gradients and kept keys against the eager formula, as exact as that formula itself is in fp32."""
    expected = solve(problem, "reference")
    precise = solve(problem, "reference", torch.float64)
    same_keys = torch.allclose(precise[0].float(), expected[0], atol=1e-3)  # else fp64's own sum decided otherwise
    truth = precise if same_keys else [x.double() for x in expected]
    floor = _rounding(problem)
    shared = {k: v for k, v in problem.options.items() if k not in ("tolerance", "surrogate_width")}
    q, k, _, log_decay = problem.inputs
    kept = attention_map(q, k, log_decay, **shared).keep.sum(-1, dtype=torch.int32)
    for variant in chosen:
        with running(variant, problem.threads) as backend:
            got, again = solve(problem, backend), solve(problem, backend)
            stats = attention_stats(q, k, log_decay, **shared, tolerance=0.0, backend=backend)
        assert torch.equal(stats.kept, kept), f"{variant} keeps other keys"
        for name, x, y, z, a in zip(NAMES, got, truth, expected, again, strict=False):
            assert torch.equal(x, a), f"{variant}: {name} differs between two equal runs"
            allowed = 4 * _largest(z - y) + 1e-5 * _steepness(problem) * _largest(y) + floor[name]
            assert _largest(x - y) <= allowed, f"{variant}: {name} is off by {_largest(x - y)}, allowed {allowed}"


def check_not_finite(clean: Drawn, dirty: Drawn, bad_value: Tensor, chosen: list[str]) -> None:
    """The same elements are NaN as in the reference, and the reference follows its law."""
    untouched, expected = solve(clean, "reference"), solve(dirty, "reference")
    bad = ~expected[0].isfinite().all(-1)  # [B, Hq, T]
    uncertain = bad
    if dirty.options.get("surrogate_width"):  # rows that remove a value which is not finite: their gradient reads it
        uncertain = bad | ~expected[1].isfinite().all(-1)
        kept_values = bad_value.repeat_interleave(bad.shape[1] // bad_value.shape[1], 1).any(-1, keepdim=True)
        assert not (uncertain & ~bad & ~kept_values).any(), "a row without such a value has a NaN gradient"
    for at, rows in ((0, bad), (1, uncertain), (4, bad)):  # out, dq, dlog_decay
        name, x, y = NAMES[at], expected[at], untouched[at]
        assert not x[rows].isfinite().any(), f"{name} of a bad row is finite"
        assert torch.allclose(x[~rows], y[~rows], atol=1e-4 * max(1.0, _largest(y))), f"{name} of a good row changed"
    for variant in chosen:
        with running(variant, dirty.threads) as backend:
            got = solve(dirty, backend)
        for name, x, y in zip(NAMES, got, expected, strict=False):
            assert torch.equal(x.isfinite(), y.isfinite()), f"{variant}: {name} is finite at other places"
            size = max(1.0, _largest(torch.where(y.isfinite(), y, 0.0)))
            assert torch.allclose(x, y, atol=5e-4 * size, rtol=1e-3, equal_nan=True), f"{variant}: {name}"


def check_dropout(problem: Drawn, p: float, seed: int, chosen: list[str]) -> None:
    """The same weights are dropped as in the formula."""
    options = {"dropout_p": p, "dropout_seed": seed, "tolerance": 0.0}
    expected = solve(problem, "reference", **options)
    for variant in chosen:
        with running(variant, problem.threads) as backend:
            got = solve(problem, backend, **options)
        for name, x, y in zip(NAMES, got, expected, strict=False):
            assert torch.allclose(x, y, atol=5e-4 * max(1.0, _largest(y)), rtol=1e-3), f"{variant}: {name}"


def check_half(problem: Drawn, dtype: torch.dtype, chosen: list[str]) -> None:
    """Storage in half precision costs a few units in the last place, no more."""
    rounded = Drawn([x.to(dtype) for x in problem.inputs], problem.options, problem.threads, problem.upstream)
    expected = solve(rounded, "reference", torch.float32)
    unit = torch.finfo(dtype).eps
    for variant in chosen:
        with running(variant, problem.threads) as backend:
            got = solve(rounded, backend, dtype)
        worst = _largest(got[0].float() - expected[0])
        assert worst <= 2 * unit * max(1.0, _largest(expected[0])), f"{variant}: out is off by {worst}"
        for name, x, y in zip(NAMES[1:], got[1:], expected[1:], strict=False):
            worst = _largest(x.float() - y)
            allowed = 16 * unit * max(1.0, _largest(y)) * _steepness(rounded)  # the stored output is rounded too
            assert worst <= allowed, f"{variant}: {name} is off by {worst}, allowed {allowed}"


def check_decode(problem: Drawn, chosen: list[str]) -> None:
    """A KeyIndex changes nothing but the time."""
    q, k, v, log_decay = problem.inputs
    index = KeyIndex()
    index.append(k[:, :, : k.shape[2] // 2])
    index.append(k[:, :, k.shape[2] // 2 :])
    options = {key: value for key, value in problem.options.items() if key != "surrogate_width"}
    expected = threshold_relative_attention(q, k, v, log_decay, backend="reference", **options)
    for variant in chosen:
        with running(variant, problem.threads) as backend:
            got = threshold_relative_attention(q, k, v, log_decay, backend=backend, key_index=index, **options)
        worst = _largest(got - expected)
        assert worst <= 5e-4 * max(1.0, _largest(expected)), f"{variant}: out is off by {worst}"
