"""What every attention layer shares: projections, QK-norm, cache, padding; a method adds only `attend`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.norms import rms_norm
from traformer.layers.options import check_shared_options, excluded_heads
from traformer.methods import Method, resolve_method

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig


@dataclass
class AttentionContext:
    """Where the tokens of one forward stand: the same for all layers, made once by the model.

    The key axis has Tk places: what a cache holds, then the T new tokens, then (static cache) empty places.
    New token t sits at place `query_start + t` and sees no place after its own.
    """

    key_padding_mask: Tensor | None = None  # [B, Tk] bool, True = a real key; None = all are real
    position_ids: Tensor | None = None  # [B or 1, T] positions of the new tokens within their sequences
    cu_seqlens: Tensor | None = None  # [n + 1] int32, where packed sequences start; batch 1 and no cache
    past_key_values: Cache | None = None
    query_start: int | Tensor = 0  # a 0-dim tensor only when a static cache is traced by torch.compile
    key_length: int | None = None  # Tk; None = T
    output_attentions: bool = False
    shared: Any = None  # what the method's `prepare` made for all layers

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
        """[B or 1, T, Tk]: how many real places a key lies before the query; what stands after it is negative."""
        keys = self.key_positions(device, length if self.key_length is None else self.key_length)
        queries = keys.index_select(1, torch.arange(length, device=device) + self.query_start)
        return queries[:, :, None] - keys[:, None, :]

    def is_plain_causal(self, length: int) -> bool:
        """Nothing but the causal order restricts what a token sees, and the key axis is the new tokens alone."""
        return (
            self.key_padding_mask is None
            and self.cu_seqlens is None
            and not isinstance(self.query_start, Tensor)
            and self.query_start == 0
            and (self.key_length is None or self.key_length == length)
        )

    def visible(self, length: int, device: torch.device, window: int | None = None) -> Tensor:
        """[B or 1, 1, T, Tk] bool, True = the token may see the key: causal order, padding, packing, sliding window."""
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
            allowed = allowed & (self.distances(length, device) < window).unsqueeze(1)
        return allowed

    def own_keys(self, length: int, device: torch.device) -> Tensor:
        """[T, Tk] bool, True where the key is the token's own."""
        key_length = length if self.key_length is None else self.key_length
        places = torch.arange(length, device=device) + self.query_start
        return torch.arange(key_length, device=device) == places[:, None]


class AttentionLayer(nn.Module):
    """Projections, QK-norm, grouped heads and cache. A method implements `attend`, and overrides the hooks it needs.

    Needs from the config: hidden_size, num_attention_heads, num_key_value_heads, head_dim, attention_dropout, qk_norm
    and attention_options.
    """

    name: ClassVar[str]

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads: int = config.num_attention_heads
        self.num_key_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.dropout_p: float = config.attention_dropout
        self.qk_norm: bool = config.qk_norm
        self.option: dict[str, Any] = self.read_options(config)
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=True)
        self.temperature = nn.Parameter(torch.zeros(self.num_heads)) if self.option.get("temperature") else None
        if self.temperature is not None:
            self.temperature.lr_scale = 10.0  # type: ignore[attr-defined]  # one number per head moves slowly at lr
        self.excluded_heads = excluded_heads(self.option.get("exclude_self", False), self.num_heads)
        self.window: int | None = self.option.get("sliding_window")

    @property
    def method(self) -> Method:
        """The layer's entry in the catalogue, for the options it has."""
        return resolve_method(self.name, self.option)

    @classmethod
    def read_options(cls, config: PretrainedConfig) -> dict[str, Any]:
        """The method's options as configured, defaults filled in; an unknown one is an error."""
        options = resolve_method(cls.name, config.attention_options).all_options
        cls.check_options(config, options)
        return options

    @classmethod
    def check_options(cls, config: PretrainedConfig, options: dict[str, Any]) -> None:
        """Raise InputError for an option whose value cannot be used."""
        check_shared_options(options, config.num_attention_heads)

    def reset_own_parameters(self) -> None:
        """Initialise parameters the method holds directly (not its Linears'), by transformers' init functions."""
        from transformers import initialization as init

        if self.temperature is not None:
            init.zeros_(self.temperature)

    def score_bound(self, dtype: torch.dtype) -> float | Tensor | None:
        """An upper bound of the scores, one number or [Hq]; None where QK-norm does not give one."""
        if not self.qk_norm:
            return None
        # |q|, |k| <= sqrt(D) up to rounding, hence s <= D * scale = sqrt(D) and a little.
        bound = math.sqrt(self.head_dim) * (1.0 + 8.0 * torch.finfo(dtype).eps)
        return bound if self.temperature is None else self.temperature.detach().exp().float() * bound

    def visible_keys(self, q: Tensor, context: AttentionContext) -> Tensor:
        """bool [B or 1, Hq or 1, T, Tk]: what each head may see, its window and excluded own key taken into account."""
        visible = context.visible(q.shape[2], q.device, self.window)
        if self.excluded_heads is False:
            return visible
        own = context.own_keys(q.shape[2], q.device)
        if not isinstance(self.excluded_heads, bool):
            own = own & torch.tensor(self.excluded_heads, device=q.device)[:, None, None]
        return visible & ~own

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Any:
        """What every layer of the method needs and one can make for all (masks, tables); becomes context.shared."""
        return None

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Write positions into the embeddings x [B, T, E]; called on the first layer only, before the first block."""
        return x

    def key_state(self, q: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor | None:
        """What a new key carries beside k and v, [B, Hkv, T, S] or None: cached with it, given to `attend` for all."""
        return None

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Write positions into new queries and keys before they are cached; most methods have none to write."""
        return q, k

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """q [B, Hq, T, D]; k, v [B, Hkv, Tk, D] -> output [B, Hq, T, D], weights [B, Hq, T, Tk] if asked for."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, E] -> output [B, T, E], weights [B, Hq, T, Tk] or None."""
        batch, length, _ = hidden_states.shape
        real = context.new_token_mask(length)
        if real is not None:
            # Whatever stands at a padded place, NaN included, may reach neither the cache nor a gradient.
            hidden_states = hidden_states.masked_fill(~real[..., None], 0.0)
        q, k, v = self.project(hidden_states)
        q, k = self.place(q, k, context)
        state = self.key_state(q, hidden_states, context)
        if context.past_key_values is not None:
            if state is not None:
                k = torch.cat((k, _as_channels(state, k.dtype)), dim=-1)
            k, v = self.remember(k, v, context.past_key_values)
            if state is not None:
                k, state = k[..., : self.head_dim], _from_channels(k[..., self.head_dim :], state.dtype)
        if self.temperature is not None:
            q = q * self.temperature.exp().to(q.dtype)[:, None, None]
        more = () if state is None else (state,)
        out, weights = self.attend(q, k, v, hidden_states, context, *more)
        out = out.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim)
        return self.o_proj(out), weights

    def remember(self, k: Tensor, v: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values to the cache; returns those of all tokens."""
        layer: Any = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        if layer is not None and layer.is_initialized and layer.keys.shape[-1] != k.shape[-1]:
            # transformers has made room for keys of head_dim channels before it saw one; ours carry more.
            if torch.compiler.is_exporting():
                raise InputError(f"a cache made before the first token cannot be exported with attention {self.name!r}")
            if int(layer.get_seq_length()) > 0:
                raise InputError(
                    f"the cache holds keys of {layer.keys.shape[-1]} channels, attention {self.name!r} here makes "
                    f"{k.shape[-1]}: it is another model's cache"
                )
            layer.lazy_initialization(k, v)
        return cache.update(k, v, self.layer_idx)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [B, T, E] -> q [B, Hq, T, D]; k, v [B, Hkv, T, D]: content alone, no position yet."""
        batch, length, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(hidden_states).view(batch, length, self.num_key_heads, self.head_dim)
        v = self.v_proj(hidden_states).view(batch, length, self.num_key_heads, self.head_dim)
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # no copy


def _as_channels(state: Tensor, dtype: torch.dtype) -> Tensor:
    """A key's state as channels of the cached key. A wider type is split into three parts, so that nothing is lost."""
    if state.dtype == dtype:
        return state
    high = state.to(dtype)
    middle = (state - high).to(dtype)
    low = (state - high - middle).to(dtype)
    return torch.cat((high, middle, low), dim=-1)


def _from_channels(channels: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_as_channels`."""
    if channels.dtype == dtype:
        return channels
    high, middle, low = channels.to(dtype).chunk(3, dim=-1)
    return high + middle + low
