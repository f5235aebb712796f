"""From what a caller passes to forward (mask, positions, packing, cache) to what the layers need to know."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from traformer.errors import InputError
from traformer.layers import AttentionContext


def make_context(
    x: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    past_key_values: Cache | None,
    output_attentions: bool,
) -> tuple[AttentionContext, Tensor | None]:
    """The context of one forward over embeddings x [B, T, E], and which new tokens are real [B, T] (None: all)."""
    batch, length, _ = x.shape
    start = _query_start(past_key_values)
    key_length = length if past_key_values is None else past_key_values.get_mask_sizes(length, 0)[0]
    if past_key_values is None:
        cu_seqlens = _packing(cu_seqlens, position_ids, attention_mask, batch, length, x.device)
    elif cu_seqlens is not None:
        raise InputError("cu_seqlens packs whole sequences and cannot be used with past_key_values; leave one out")
    mask = _check_mask(attention_mask, batch, length, start, x.device)
    if position_ids is None:
        position_ids = _positions(mask, cu_seqlens, start, length, x.device)
    elif position_ids.shape not in ((1, length), (batch, length)):
        raise InputError(
            f"position_ids must be [{batch}, {length}] like the new tokens, not {list(position_ids.shape)}"
        )
    real = None
    if mask is not None:
        real = mask[:, -length:]
        if past_key_values is None and not output_attentions and _is_right_padded(mask):
            mask = None  # padding after every real token: the causal order already hides it
        elif mask.shape[1] < key_length:  # a static cache's empty places
            mask = torch.nn.functional.pad(mask, (0, key_length - mask.shape[1]), value=False)
    context = AttentionContext(
        key_padding_mask=mask,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        past_key_values=past_key_values,
        query_start=start,
        key_length=key_length,
        output_attentions=output_attentions,
    )
    return context, real


def _query_start(past_key_values: Cache | None) -> int | Tensor:
    """How many tokens the cache holds. A static cache's count is a tensor, and stays one while traced."""
    if past_key_values is None:
        return 0
    start = past_key_values.get_seq_length()
    if isinstance(start, Tensor):
        return start.clone() if torch.compiler.is_compiling() else int(start)
    return start


def _check_mask(
    mask: Tensor | None, batch: int, length: int, start: int | Tensor, device: torch.device
) -> Tensor | None:
    """[B, past + T] bool, or None where nothing is padded."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise InputError(
            f"attention_mask must be [batch, length] with 1 for real tokens, not {list(mask.shape)}; "
            "the causal order is the model's own"
        )
    known = not isinstance(start, Tensor)
    if mask.shape[0] != batch or (known and mask.shape[1] != start + length):
        expected = f"[{batch}, {start + length}]" if known else f"[{batch}, past + {length}]"
        raise InputError(
            f"attention_mask must be {expected}, one entry for every token cached so far and every new one, "
            f"not {list(mask.shape)}"
        )
    mask = mask.to(device=device, dtype=torch.bool)
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def _is_right_padded(mask: Tensor) -> bool:
    """Every padded place stands after every real one of its row."""
    if torch.compiler.is_compiling():
        return False
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _positions(
    mask: Tensor | None, cu_seqlens: Tensor | None, start: int | Tensor, length: int, device: torch.device
) -> Tensor:
    """[B or 1, T]: padded places do not count, packed sequences start at 0."""
    if mask is not None:
        return (mask.long().cumsum(-1) - 1).clamp_(min=0)[:, -length:]
    places = torch.arange(length, device=device) + start
    if cu_seqlens is not None:
        places = places - cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]
    return places[None]


def _packing(
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    batch: int,
    length: int,
    device: torch.device,
) -> Tensor | None:
    """Starts of packed sequences, from cu_seqlens or from position ids that start over."""
    if cu_seqlens is not None:
        if batch != 1:
            raise InputError(f"cu_seqlens packs sequences along one row: the batch must be 1, not {batch}")
        return cu_seqlens.to(device)
    if position_ids is None or length < 2 or (attention_mask is not None and not _all_real(attention_mask)):
        return None
    starts_over = position_ids[:, 1:] <= position_ids[:, :-1]  # [B or 1, T - 1]
    tracing = torch.compiler.is_compiling()
    if not tracing and not bool(starts_over.any()):
        return None
    if batch != 1:
        if tracing:  # a batch is never packed, which is checked whenever the model runs untraced
            return None
        raise InputError(
            f"position_ids start over within a row, which means packed sequences: the batch must then be 1, not {batch}"
        )
    # One entry a token, so that the shape does not depend on the data: unused ones are empty sequences at the end.
    places = torch.arange(1, length, device=device)
    starts = torch.where(starts_over[0], places, length).sort().values
    ends = starts.new_tensor([0]), starts, starts.new_tensor([length])
    cu = torch.cat(ends).to(torch.int32)
    return cu if tracing else cu[: int(starts_over.sum()) + 1 + 1]


def _all_real(attention_mask: Tensor) -> bool:
    return not torch.compiler.is_compiling() and bool(attention_mask.all())
