"""Problems that every backend must solve alike, and the oracle to compare with."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.ops import available_backends, threshold_relative_attention
from traformer.ops.threshold_relative.backends import BACKENDS

# Backends that solve problems on this machine's CPU; triton does under TRITON_INTERPRET=1.
HERE = [
    name
    for name in available_backends()
    if BACKENDS[name].device in (None, "cpu") or os.environ.get("TRITON_INTERPRET") == "1"
]
FUSED = [name for name in HERE if BACKENDS[name].fused]
DOUBLE = [name for name in HERE if torch.float64 in BACKENDS[name].dtypes]


def finest_dtype(backend: str) -> torch.dtype:
    """The most precise type that a backend takes."""
    return BACKENDS[backend].dtypes[0]


LENGTHS = (1, 2, 7, 8, 9, 63, 129)
DECAYS = {
    "init": lambda shape, generator: F.logsigmoid(torch.randn(shape, generator=generator, dtype=torch.float64)),
    "long": lambda shape, generator: F.logsigmoid(torch.randn(shape, generator=generator, dtype=torch.float64) + 6),
    "zero": lambda shape, generator: torch.zeros(shape, dtype=torch.float64),
    "tiny": lambda shape, generator: torch.full(shape, -1e-8, dtype=torch.float64),
    "steep": lambda shape, generator: torch.full(shape, -100.0, dtype=torch.float64),
}


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def make(
    batch=2, heads=4, key_heads=2, queries=63, keys=None, width=16, decay="init", dtype=torch.float64, seed=0,
    normed=True, shift=0.0,
):  # fmt: skip
    """q, k, v, log_decay as transposes of [B, T, H, D] that need gradients. shift moves scores up or down."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys

    def heads_last(length: int, count: int) -> Tensor:
        x = torch.randn(batch, length, count, width, generator=generator, dtype=torch.float64) + shift
        return (rms_norm(x) if normed else x).to(dtype)

    q, k = heads_last(queries, heads), heads_last(keys, key_heads)
    if shift < 0:
        q = -q
    v = torch.randn(batch, keys, key_heads, width, generator=generator, dtype=torch.float64).to(dtype)
    log_decay = DECAYS[decay]((batch, heads, queries), generator).to(dtype)
    return (*(x.transpose(1, 2).requires_grad_() for x in (q, k, v)), log_decay.requires_grad_())


def run(inputs, backend, upstream_dtype=None, **options):
    """out and the four gradients for one fixed upstream gradient, rounded to upstream_dtype (default that of out)."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    out = threshold_relative_attention(*leaves, backend=backend, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = upstream.to(upstream_dtype or out.dtype).to(out)
    return (out.detach(), *torch.autograd.grad(out, leaves, upstream))


def oracle(inputs, **options):
    """The fp64 reference on the same stored values."""
    return run([x.detach().double() for x in inputs], "reference", upstream_dtype=inputs[0].dtype, **options)


def assert_all_close(got, expected, rtol, atol):
    """Element by element, each result named."""
    assert len(got) == len(expected)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dlog_decay"), got, expected, strict=False):
        torch.testing.assert_close(
            a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )
