"""What every attention layer shares: projections, QK-norm, cache, padding; a method adds only `attend`."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.cache import KeyValueCache
from traformer.layers.context import AttentionContext, Prepared, make_context
from traformer.layers.initialization import reset_module
from traformer.layers.norms import rms_norm
from traformer.layers.options import LayerConfig, check_shared_options, excluded_heads, previous_heads
from traformer.methods import Method, resolve_method, stack_of
from traformer.types import Options


class AttentionLayer(nn.Module):
    """Causal self-attention as a plain module: `y = attn(x)`, x and y [B, T, E].

    embed_dim      width E of the input and the output
    num_heads      query heads
    num_kv_heads   key and value heads, a divisor of num_heads; by default as many
    head_dim       channels of a head; by default embed_dim / num_heads
    qk_norm        RMS-normalise queries and keys per head, without a learned scale
    dropout        on the weights, after the softmax
    layer_idx      the layer's place in its stack, which some methods and every model's cache need
    leader         the first layer of the stack with the same method and options, which holds what they share
    initialize     False: the caller initialises the parameters, as models do
    **options      the method's own options, as its entry in `traformer.methods` lists them

    A method implements `attend`, and overrides the hooks it needs.
    """

    name: ClassVar[str]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        qk_norm: bool = True,
        dropout: float = 0.0,
        layer_idx: int = 0,
        leader: int | None = None,
        initialize: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_key_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_shape(embed_dim, num_heads, self.num_key_heads, head_dim, dropout)
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.layer_idx = layer_idx
        self.leader = layer_idx if leader is None else leader
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.dropout_p, self.qk_norm = dropout, qk_norm
        self.option: Options = resolve_method(self.name, options).all_options
        self.check_options(self.option, num_heads, self.head_dim)
        self.previous_heads = previous_heads(self.option, num_heads)
        self.excluded_heads = excluded_heads(self.option, num_heads)
        self.window: int | None = self.option.get("sliding_window")
        self.sinks: int = self.option.get("sinks", 0)
        self.temperature: nn.Parameter | None = None
        self.add_parameters()
        if initialize:
            self.reset_parameters()

    def add_parameters(self) -> None:
        """Create the layer's modules and parameters; a method adds its own after these."""
        self.q_proj = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(self.embed_dim, self.num_key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(self.embed_dim, self.num_key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, self.embed_dim, bias=True)
        if self.option.get("temperature"):
            self.temperature = nn.Parameter(torch.zeros(self.num_heads))
            self.temperature.lr_scale = 10.0  # type: ignore[attr-defined]  # one number per head moves slowly at lr

    @classmethod
    def from_config(cls, config: LayerConfig, layer_idx: int) -> Self:
        """The layer of a model's stack: ours or a converted one. The model initialises it."""
        stack = stack_of(config)
        method = stack[layer_idx]
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=config.head_dim,
            qk_norm=bool(method.qk_norm),
            dropout=config.attention_dropout,
            layer_idx=layer_idx,
            leader=next(i for i, other in enumerate(stack) if other.is_same(method)),
            initialize=False,
            **cls.arguments_of(config),
            **method.options,
        )

    @classmethod
    def arguments_of(cls, config: LayerConfig) -> Options:
        """Further arguments that the method takes from a model's configuration."""
        return {}

    @property
    def method(self) -> Method:
        """The layer's entry in the catalogue, for the options it has."""
        return resolve_method(self.name, self.option)

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        """Raise InputError for an option whose value cannot be used."""
        check_shared_options(options, num_heads)

    def reset_parameters(self) -> None:
        """Initialise all parameters, as in a model."""
        for module in self.children():
            reset_module(module)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the parameters that the layer holds itself (not its Linears'), with functions of torch.nn.init."""
        if self.temperature is not None:
            nn.init.zeros_(self.temperature)

    def score_bound(self, dtype: torch.dtype, keys: int) -> float | Tensor | None:
        """An upper bound of the scores among that many keys, one number or [Hq]; None where QK-norm gives none."""
        if not self.qk_norm:
            return None
        # |q|, |k| <= sqrt(D) up to rounding, hence s <= D * scale = sqrt(D) and a little.
        bound = math.sqrt(self.head_dim) * (1.0 + 8.0 * torch.finfo(dtype).eps)
        return bound if self.temperature is None else self.temperature.detach().exp().float() * bound

    def looks_back(self, like: Tensor) -> Tensor:
        """Which heads are `previous_heads`, bool [Hq, 1], where `like` is."""
        return torch.tensor(self.previous_heads or [False] * self.num_heads, device=like.device)[:, None]

    def visible_keys(self, q: Tensor, context: AttentionContext) -> Tensor:
        """bool [B or 1, Hq or 1, T, Tk]: what each head may see, its window and excluded keys taken into account."""
        visible = context.visible(q.shape[2], q.device, self.window, self.sinks)
        if self.excluded_heads is False:
            return visible
        own = context.own_keys(q.shape[2], q.device)
        if not isinstance(self.excluded_heads, bool):
            own = own & torch.tensor(self.excluded_heads, device=q.device)[:, None, None]
        visible = visible & ~own
        if self.previous_heads is None:
            return visible
        places = torch.arange(visible.shape[-1], device=q.device)
        return visible & (
            ~self.looks_back(q)[..., None] | (places == context.previous_places(q.shape[2], q.device)[:, None, :, None])
        )

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Prepared:
        """What all layers of one method and options share in a forward; the first of them makes it."""
        return Prepared(self.make_mask(context, hidden_states), self.make_tables(context, hidden_states))

    def make_mask(self, context: AttentionContext, hidden_states: Tensor) -> Tensor | None:
        """The mask [B or 1, 1, T, Tk] that `attend` needs, if any."""
        return None

    def make_tables(self, context: AttentionContext, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """What else the method's layers look up."""
        return ()

    def mask(self, context: AttentionContext) -> Tensor | None:
        """What `make_mask` made."""
        return context.shared[self.leader].mask

    def tables(self, context: AttentionContext) -> tuple[Tensor, ...]:
        """What `make_tables` made."""
        return context.shared[self.leader].tables

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Write positions into the embeddings x [B, T, E]; called on the method's first layer, before any block."""
        return x

    def key_state(self, q: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor | None:
        """What a new key has besides k and v, [B, Hkv, T, S] or None: cached with it, passed to `attend` for all."""
        return None

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Write positions into new queries and keys before they are cached; most methods have none to write."""
        return q, k

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """q [B, Hq, T, D]; k, v [B, Hkv, Tk, D] -> output [B, Hq, T, D], weights [B, Hq, T, Tk] if asked for."""
        raise NotImplementedError

    @overload
    def forward(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]: ...

    @overload
    def forward(
        self,
        hidden_states: Tensor,
        context: None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor: ...

    def forward(
        self,
        hidden_states: Tensor,
        context: AttentionContext | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, E] -> output [B, T, E].

        key_padding_mask  [B, past + T] bool, True = a real token: those in the cache, then the new ones
        cu_seqlens        [n + 1] where packed sequences start and end; batch 1
        cache             a KeyValueCache: the tokens continue those that it holds, and are added to it
        context           from a model, which makes it once for all layers; then weights [B, Hq, T, Tk] (or None) are
                          also returned
        """
        if context is not None:
            return self.mix(hidden_states, context)
        x = hidden_states
        if x.dim() != 3 or x.shape[-1] != self.embed_dim or not x.is_floating_point():
            raise InputError(
                f"the input must be floats [batch, length, {self.embed_dim}], not {x.dtype} {list(x.shape)}"
            )
        context, real = make_context(x, key_padding_mask, None, cu_seqlens, cache, None, mask_name="key_padding_mask")
        x = self.embed(x, context)
        if real is not None:
            x = x.masked_fill(~real[..., None], 0.0)
        context.shared[self.leader] = self.prepare(context, x)
        return self.mix(x, context)[0]

    def mix(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, T, E] -> output [B, T, E], weights [B, Hq, T, Tk] or None."""
        batch, length, _ = hidden_states.shape
        real = context.new_token_mask(length)
        if real is not None:
            # Whatever is at a padded place, NaN included, must reach neither the cache nor a gradient.
            hidden_states = hidden_states.masked_fill(~real[..., None], 0.0)
        q, k, v = self.project(hidden_states)
        q, k = self.place(q, k, context)
        state = self.key_state(q, hidden_states, context)
        if context.past_key_values is not None:
            if state is not None:
                k = torch.cat((k, _as_channels(state, k.dtype)), dim=-1)
            k, v = self.remember(k, v, context)
            if state is not None:
                k, state = k[..., : self.head_dim], _from_channels(k[..., self.head_dim :], state.dtype)
        if self.temperature is not None:
            q = q * self.temperature.exp().to(q.dtype)[:, None, None]
        more = () if state is None else (state,)
        out, weights = self.attend(q, k, v, hidden_states, context, *more)
        out = out.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim)
        return self.o_proj(out), weights

    def remember(self, k: Tensor, v: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values to the cache; returns those of all tokens."""
        cache, layer = context.past_key_values, context.layer_cache(self.layer_idx)
        assert cache is not None
        if isinstance(cache, KeyValueCache):
            return cache.update(k, v)
        held = layer.keys if layer is not None and layer.is_initialized else None
        if layer is not None and held is not None and held.shape[-1] != k.shape[-1]:
            # transformers has made room for keys of head_dim channels before it saw one; ours carry more.
            if torch.compiler.is_exporting():
                raise InputError(f"a cache made before the first token cannot be exported with attention {self.name!r}")
            if int(layer.get_seq_length()) > 0:
                raise InputError(
                    f"the cache holds keys of {held.shape[-1]} channels, attention {self.name!r} here makes "
                    f"{k.shape[-1]}: it is another model's cache"
                )
            layer.lazy_initialization(k, v)
        keys, values = cache.update(k, v, self.layer_idx)
        return keys, values

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [B, T, E] -> q [B, Hq, T, D]; k, v [B, Hkv, T, D]: content alone, no position yet."""
        batch, length, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(hidden_states).view(batch, length, self.num_key_heads, self.head_dim)
        v = self.v_proj(hidden_states).view(batch, length, self.num_key_heads, self.head_dim)
        q, k = self.norm_heads(q, k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # no copy

    def norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """QK-norm of queries and keys [B, T, H, D], where it is on."""
        return (rms_norm(q), rms_norm(k)) if self.qk_norm else (q, k)


def _check_shape(embed_dim: int, num_heads: int, num_key_heads: int, head_dim: int | None, dropout: float) -> None:
    if min(embed_dim, num_heads, num_key_heads, 1 if head_dim is None else head_dim) < 1 or num_heads % num_key_heads:
        raise InputError(
            f"sizes must be positive and num_heads a multiple of num_kv_heads, not {num_heads} and {num_key_heads} "
            f"heads of embed_dim {embed_dim}"
        )
    if head_dim is None and embed_dim % num_heads:
        raise InputError(f"embed_dim ({embed_dim}) must be a multiple of num_heads ({num_heads}), or set head_dim")
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout must be in [0, 1), not {dropout}")


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
