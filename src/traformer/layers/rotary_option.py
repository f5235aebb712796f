"""RoPE as a companion of methods that leave position to others: the option `position`."""

from __future__ import annotations

from torch import Tensor

from traformer.errors import InputError, unknown_name
from traformer.layers.context import AttentionContext
from traformer.ops.rope import apply_rope, rope_tables
from traformer.types import Options

POSITIONS = ("rope", "none")


def check_rotary(name: str, head_dim: int, options: Options) -> None:
    if options["position"] not in POSITIONS:
        raise unknown_name("attention option position", options["position"], POSITIONS)
    if options["position"] == "rope" and head_dim % 2:
        raise InputError(f"attention {name!r} turns pairs of channels and needs an even number of them, not {head_dim}")
    if not options["theta"] > 0:
        raise InputError(f"attention option theta must be positive, got {options['theta']}")


def rotary_tables(
    context: AttentionContext, hidden_states: Tensor, head_dim: int, options: Options
) -> tuple[Tensor, ...]:
    """Cosines and sines of the new tokens' positions; empty where the option is "none"."""
    if options["position"] == "none":
        return ()
    positions = context.positions(hidden_states.shape[1], hidden_states.device)
    return rope_tables(positions, head_dim, options["theta"], hidden_states.dtype)


def turned(x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """x [B, H, T, D], rotated by RoPE if there are tables."""
    return apply_rope(x, tables).to(x.dtype) if tables else x
