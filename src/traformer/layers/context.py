"""What a layer needs to know about the tokens of one forward, from what a caller passes (mask, packing, cache)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.errors import InputError
from traformer.layers.cache import KeyValueCache

if TYPE_CHECKING:
    from transformers import Cache
    from transformers.cache_utils import CacheLayerMixin


class Prepared(NamedTuple):
    """What the layers of one method and options share in one forward."""

    mask: Tensor | None = None  # [B or 1, 1, T, Tk] bool, True = visible; None: the method needs no mask
    tables: tuple[Tensor, ...] = ()  # what else the method looks up: rotations, buckets, distances


@dataclass
class AttentionContext:
    """Where the tokens of one forward are: the same for all layers, made once by the model.

    The key axis has Tk places: what a cache holds, then the T new tokens, then (static cache) empty places.
    New token t sits at place `query_start + t` and sees no place after its own.
    """

    key_padding_mask: Tensor | None = None  # [B, Tk] bool, True = a real key; None = all are real
    position_ids: Tensor | None = None  # [B or 1, T] positions of the new tokens within their sequences
    cu_seqlens: Tensor | None = None  # [n + 1] int32, where packed sequences start; batch 1 and no cache
    past_key_values: Cache | KeyValueCache | None = None  # a model's cache, or that of a layer on its own
    query_start: int | Tensor = 0  # a 0-dim tensor only when a static cache is traced by torch.compile
    key_length: int | None = None  # Tk; None = T
    output_attentions: bool = False
    shared: dict[int, Prepared] = field(default_factory=dict)  # what `prepare` made, by the layer that made it

    def layer_cache(self, layer_idx: int) -> CacheLayerMixin | KeyValueCache | None:
        """What the cache holds for one layer; None: nothing yet, or there is no cache."""
        cache = self.past_key_values
        if cache is None or isinstance(cache, KeyValueCache):
            return cache
        return cast("CacheLayerMixin", cache.layers[layer_idx]) if layer_idx < len(cache.layers) else None

    def new_token_mask(self, length: int) -> Tensor | None:
        """[B, T] bool, True = a real new token; None = all are real."""
        if self.key_padding_mask is None:
            return None
        if isinstance(self.query_start, Tensor):
            places = self.query_start + torch.arange(length, device=self.query_start.device)
            return self.key_padding_mask.index_select(1, places)
        return self.key_padding_mask[:, self.query_start : self.query_start + length]

    def positions(self, length: int, device: torch.device) -> Tensor:
        """[B or 1, T] positions of the new tokens."""
        if self.position_ids is not None:
            return self.position_ids
        return (torch.arange(length, device=device) + self.query_start)[None]

    def key_positions(self, device: torch.device, key_length: int) -> Tensor:
        """[B or 1, Tk]: places counted without the padded ones; differences between them are distances."""
        if self.key_padding_mask is None:
            return torch.arange(key_length, device=device)[None]
        return self.key_padding_mask.long().cumsum(-1)

    def distances(self, length: int, device: torch.device) -> Tensor:
        """[B or 1, T, Tk]: how many real places a key is before the query; negative after it."""
        keys = self.key_positions(device, length if self.key_length is None else self.key_length)
        queries = keys.index_select(1, torch.arange(length, device=device) + self.query_start)
        return queries[:, :, None] - keys[:, None, :]

    def places(self, length: int, device: torch.device) -> Tensor:
        """[B or 1, T]: how many real tokens of its own sequence are before each new one."""
        queries = torch.arange(length, device=device) + self.query_start
        if self.cu_seqlens is not None:
            return (queries - self.cu_seqlens[torch.searchsorted(self.cu_seqlens, queries, right=True) - 1])[None]
        if self.key_padding_mask is not None:
            return self.key_padding_mask.long().cumsum(-1).index_select(1, queries) - 1
        return queries[None]

    def previous_places(self, length: int, device: torch.device) -> Tensor:
        """[B or 1, T]: the place of the last real token before each new one.

        Before the first of a sequence it is one that the query may not see: place 0, or another sequence's last.
        """
        before = torch.arange(length, device=device) + self.query_start - 1
        if self.key_padding_mask is None:
            return before.clamp(min=0)[None]
        places = torch.arange(self.key_padding_mask.shape[1], device=device)
        last = torch.where(self.key_padding_mask, places, 0).cummax(-1).values  # up to and with each place
        return last.index_select(1, before.clamp(min=0))

    def of_previous(self, x: Tensor, length: int) -> Tensor:
        """What the last real token before each new one has: x [B, H, Tk, D], or its end, -> [B, H, T, D].

        For the first of a sequence it is what a query may not see, see `previous_places`.
        """
        dropped = (length if self.key_length is None else self.key_length) - x.shape[2]  # places before those of x
        if self.key_padding_mask is None and not isinstance(self.query_start, Tensor):
            start = self.query_start - dropped - 1
            return x[:, :, start : start + length] if start >= 0 else F.pad(x[:, :, : length - 1], (0, 0, 1, 0))
        places = (self.previous_places(length, x.device) - dropped).clamp(min=0)
        return x.gather(2, places[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))

    def of_own_keys(self, x: Tensor, length: int) -> Tensor:
        """What the new tokens' own keys have: x [B, H, Tk] -> [B, H, T]."""
        return x.index_select(2, torch.arange(length, device=x.device) + self.query_start)

    def ends_before(self, place: int, length: int) -> bool:
        """Whether no new token can be at `place` or after it, as far as that is known without reading values."""
        return not isinstance(self.query_start, Tensor) and self.query_start + length <= place

    def is_plain_causal(self, length: int) -> bool:
        """Nothing but the causal order restricts what a token sees, and the key axis is the new tokens alone."""
        return (
            self.key_padding_mask is None
            and self.cu_seqlens is None
            and not isinstance(self.query_start, Tensor)
            and self.query_start == 0
            and (self.key_length is None or self.key_length == length)
        )

    def visible(self, length: int, device: torch.device, window: int | None = None, sinks: int = 0) -> Tensor:
        """[B or 1, 1, T, Tk] bool, True = the token may see the key: causal order, padding, packing, sliding window.

        The first `sinks` keys of a sequence are seen from beyond the window, too.
        """
        key_length = length if self.key_length is None else self.key_length
        keys = torch.arange(key_length, device=device)
        queries = torch.arange(length, device=device) + self.query_start
        allowed = keys[None, :] <= queries[:, None]  # [T, Tk]
        if self.cu_seqlens is not None:
            segment = torch.searchsorted(self.cu_seqlens, keys, right=True)
            allowed = allowed & (segment[:, None] == segment[None, :])
        allowed = allowed[None, None]
        if self.key_padding_mask is not None:
            allowed = allowed & self.key_padding_mask[:, None, None, :]
        if window is not None:
            near = (self.distances(length, device) < window).unsqueeze(1)
            allowed = allowed & (near | self.first_keys(sinks, key_length, device) if sinks else near)
        return allowed

    def first_keys(self, count: int, key_length: int, device: torch.device) -> Tensor:
        """[B or 1, 1, 1, Tk] bool, True = one of the first `count` real keys of its sequence."""
        keys = torch.arange(key_length, device=device)
        if self.cu_seqlens is not None:
            segment = torch.searchsorted(self.cu_seqlens, keys, right=True)
            return (keys - self.cu_seqlens[segment - 1] < count)[None, None, None]
        if self.key_padding_mask is not None:
            return (self.key_padding_mask.long().cumsum(-1) <= count)[:, None, None]
        return (keys < count)[None, None, None]

    def own_keys(self, length: int, device: torch.device) -> Tensor:
        """[T, Tk] bool, True where the key is the token's own."""
        key_length = length if self.key_length is None else self.key_length
        places = torch.arange(length, device=device) + self.query_start
        return torch.arange(key_length, device=device) == places[:, None]


def make_context(
    x: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    past_key_values: Cache | KeyValueCache | None,
    new_cache: Callable[[], Cache] | None,
    output_attentions: bool = False,
    mask_name: str = "attention_mask",
) -> tuple[AttentionContext, Tensor | None]:
    """The context of one forward over embeddings x [B, T, E], and which new tokens are real [B, T] (None: all).

    new_cache makes the cache where none was passed; packed sequences are whole and get none.
    """
    batch, length, _ = x.shape
    if position_ids is not None and position_ids.shape not in ((1, length), (batch, length)):
        raise InputError(
            f"position_ids must be [{batch}, {length}] like the new tokens, not {list(position_ids.shape)}"
        )
    start = _query_start(past_key_values)
    key_length = _key_length(past_key_values, length)
    mask = _full_mask(attention_mask, batch, length, start, key_length, x.device, mask_name)
    context = AttentionContext(
        key_padding_mask=mask,
        past_key_values=past_key_values,
        query_start=start,
        key_length=key_length,
        output_attentions=output_attentions,
    )
    real = context.new_token_mask(length)
    context.cu_seqlens = _packing(cu_seqlens, position_ids, real, batch, length, x.device)
    if context.cu_seqlens is None:
        if past_key_values is None and new_cache is not None:
            context.past_key_values = new_cache()
    elif past_key_values is not None:
        raise InputError("packed sequences (cu_seqlens, or position_ids that start over) cannot use past_key_values")
    context.position_ids = _positions(context, length, x.device) if position_ids is None else position_ids
    if mask is not None and past_key_values is None and not output_attentions and _is_right_padded(mask):
        context.key_padding_mask = None  # padding after every real token: the causal order already hides it
    return context, real


def _query_start(past_key_values: Cache | KeyValueCache | None) -> int | Tensor:
    """How many tokens the cache holds. A static cache's count is a tensor, and stays one while traced."""
    if past_key_values is None:
        return 0
    start: int | Tensor = past_key_values.get_seq_length()
    if isinstance(start, Tensor):
        return start.clone() if torch.compiler.is_compiling() else int(start)
    return start


def _key_length(past_key_values: Cache | KeyValueCache | None, length: int) -> int:
    """How many places the key axis has."""
    if past_key_values is None:
        return length
    if isinstance(past_key_values, KeyValueCache):
        return past_key_values.get_seq_length() + length
    places: int = past_key_values.get_mask_sizes(length, 0)[0]
    return places


def _full_mask(
    mask: Tensor | None,
    batch: int,
    length: int,
    start: int | Tensor,
    key_length: int,
    device: torch.device,
    name: str,
) -> Tensor | None:
    """[B, Tk] bool, or None where nothing is padded."""
    if mask is None:
        return None
    if mask.dim() != 2:
        raise InputError(
            f"{name} must be [batch, length] with 1 for real tokens, not {list(mask.shape)}; "
            "the causal order is the model's own"
        )
    total = key_length if isinstance(start, Tensor) else start + length
    if mask.shape[0] != batch or mask.shape[1] not in (total, key_length):
        raise InputError(
            f"{name} must be [{batch}, {total}], one entry for every token cached so far and every new one, "
            f"not {list(mask.shape)}"
        )
    mask = mask.to(device=device, dtype=torch.bool)
    if not torch.compiler.is_compiling() and bool(mask[:, :total].all()):
        return None
    return F.pad(mask, (0, key_length - mask.shape[1]), value=False)  # a static cache's empty places


def _is_right_padded(mask: Tensor) -> bool:
    """Whether every padded place is after every real one of its row."""
    if torch.compiler.is_compiling():
        return False
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _positions(context: AttentionContext, length: int, device: torch.device) -> Tensor:
    """[B or 1, T]: padded places do not count, packed sequences start at 0."""
    mask, cu_seqlens = context.key_padding_mask, context.cu_seqlens
    places = torch.arange(length, device=device) + context.query_start
    if mask is not None:
        return (mask.long().cumsum(-1) - 1).clamp_(min=0).index_select(1, places)
    if cu_seqlens is not None:
        places = places - cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]
    return places[None]


def _packing(
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    real: Tensor | None,
    batch: int,
    length: int,
    device: torch.device,
) -> Tensor | None:
    """Where packed sequences start and end, from cu_seqlens or from position ids that start over."""
    if cu_seqlens is not None:
        return _check_cu_seqlens(cu_seqlens, batch, length, device)
    if position_ids is None or length < 2:
        return None
    starts_over = position_ids[:, 1:] <= position_ids[:, :-1]  # [B or 1, T - 1]
    if real is not None:
        starts_over = starts_over & real[:, 1:] & real[:, :-1]
    tracing = torch.compiler.is_compiling()
    if not tracing and not bool(starts_over.any()):
        return None
    if batch != 1:
        sentence = "position_ids start over within a row, which means packed sequences: the batch must then be 1"
        if not tracing:
            raise InputError(f"{sentence}, not {batch}")
        torch._assert_async(~starts_over.any(), sentence)
        return None
    # One entry per token, so that the shape does not depend on the data: unused ones are empty sequences at the end.
    starts = torch.where(starts_over[0], torch.arange(1, length, device=device), length).sort().values
    cu_seqlens = F.pad(F.pad(starts, (1, 0), value=0), (0, 1), value=length).to(torch.int32)
    return cu_seqlens if tracing else cu_seqlens.unique()


def _check_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int, device: torch.device) -> Tensor:
    if batch != 1:
        raise InputError(f"cu_seqlens packs sequences along one row: the batch must be 1, not {batch}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise InputError(f"cu_seqlens must be whole numbers 0, end, end, ..., not {list(cu_seqlens.shape)}")
    cu_seqlens = cu_seqlens.to(device, torch.int32)
    if not torch.compiler.is_compiling():
        rises = bool((cu_seqlens.diff() >= 0).all())
        if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != length or not rises:
            raise InputError(
                f"cu_seqlens must rise from 0 to the number of tokens, {length}; got {cu_seqlens.tolist()[:8]}"
            )
    return cu_seqlens
