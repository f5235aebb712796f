"""What a run or an evaluation will need of memory, estimated before it is tried.

Weights, gradients and AdamW's two moments exactly; activations as so many floats per token and layer (from the trunk's
own list of saved tensors); attention maps only for methods that make them, as many as were measured (`map_floats` in
`traformer.methods`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from traformer.errors import InputError
from traformer.methods import EAGER, TORCH, Method, stack_of
from traformer.query_blocks import QUERY_BLOCK, queries_at_once

if TYPE_CHECKING:
    import torch

FLOAT = 4
LOGITS_AT_ONCE = 3 * FLOAT * (1 << 24)  # see traformer.models.loss
RESERVE = 0.1  # share of the memory that is left to everything else


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes for one process."""

    fixed: int  # weights, gradients, optimizer
    per_sequence: int  # activations of one sequence of the given length
    head: int = 0  # logits of one sequence and what is made of them; the loss takes them in chunks

    def total(self, batch: int) -> int:
        return self.fixed + batch * self.per_sequence + min(batch * self.head, LOGITS_AT_ONCE)


def memory_need(
    model_config: Any, length: int, *, training: bool, scored: int | None = None, batch: int = 1, on_cpu: bool = True
) -> MemoryNeed:
    """Need of `batch` sequences of `length` tokens, of which `scored` (default all) pass through the head."""
    width = model_config.hidden_size
    hidden = getattr(model_config, "intermediate_size", None) or 4 * width  # GPT-2's config says it in another way
    layers, vocabulary = model_config.num_hidden_layers, model_config.vocab_size
    heads = model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or width // heads
    inner = heads * head_dim  # of queries, and of what attention returns
    key_heads = getattr(model_config, "num_key_value_heads", None) or heads
    block = 2 * width * (inner + key_heads * head_dim) + 3 * width * hidden
    parameters = layers * block + 2 * vocabulary * width
    fixed = parameters * FLOAT * (4 if training else 1)
    # Saved for backward, per token and layer: two norms and residuals (6 widths), q k v before and after norms (5
    # inner), attention output twice (2 inner), the gated MLP's halves, gate and product (about 5 hidden).
    saved = (6 * width + 7 * inner + 5 * hidden) * length
    block = queries_at_once(batch, heads, length, on_cpu)
    made = [_map_floats(method, model_config, length, block, training) for method in stack_of(model_config)]
    maps, mask = max(one.at_once for one in made), max(one.mask for one in made)
    head = 3 * (length if scored is None else scored) * vocabulary
    # One layer more in training: the gradients on their way through it.
    activations = (layers + 1) * saved + sum(one.kept for one in made) if training else saved
    floats = activations + maps + mask + 4 * width * length
    return MemoryNeed(fixed, floats * FLOAT, head * FLOAT)


@dataclass(frozen=True)
class _Maps:
    """Numbers in the attention maps of one layer."""

    kept: int  # until the backward
    at_once: int  # more while they are made, or made again in the backward
    mask: int  # shared by all layers of the kind


def _map_floats(method: Method, model_config: Any, length: int, block: int, training: bool) -> _Maps:
    heads = model_config.num_attention_heads
    per_pair = method.map_floats * heads + method.pair_floats
    if method.path == EAGER:
        # A block of queries has the keys up to its end, on average half of them. The mask is whole: bytes, and copies.
        block, is_kept = min(length, block), length <= QUERY_BLOCK
        made = per_pair * block * length
        return _Maps(
            kept=per_pair * length * (length + block) // 2 if is_kept else 0,
            at_once=made if is_kept or not training else 2 * made,  # made again, and gradients
            mask=length * length,
        )
    if method.writes_square or (method.path == TORCH and training and model_config.attention_dropout > 0):
        square = per_pair * length * length  # dropout takes torch's attention off its fused path
        return _Maps(square, square, 0)
    return _Maps(0, 0, 0)


def available_memory(device: torch.device | str | None = None) -> int:
    """Bytes that may still be taken on the device, or in the machine (or container) for the CPU."""
    if device is not None and getattr(device, "type", device) == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    try:  # a container's own limit, where there is one
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(used.read()))
    except (OSError, ValueError):
        pass
    return max(0, min(available, _below_own_limit()))


def _below_own_limit() -> int:
    """Bytes that this process may still take under its own limit (ulimit -v); a great many where there is none."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 1 << 62
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit - psutil.Process().memory_info().vms


def check_fits(need: int, available: int, what: str, remedy: str, reserve: float = RESERVE) -> None:
    """Raise the sentence if `need` is more than may be taken."""
    if need > available * (1 - reserve):
        kept = f" ({reserve:.0%} of that is kept free)" if need <= available else ""
        raise InputError(
            f"{what} needs about {gib(need)} of memory and {gib(available)} are free{kept}, so it is not tried; "
            f"{remedy}"
        )


def gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
