"""An attention layer of ours with the projections of another model's."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from transformers.initialization import guard_torch_init_functions

from traformer.layers import AttentionContext, AttentionLayer, RMSNorm, layer_class
from traformer.layers.initialization import fill, reset_bias, reset_module
from traformer.layers.options import LayerConfig
from traformer.methods import METHODS
from traformer.ops.alibi import alibi_slopes

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class ConvertedAttention(AttentionLayer):
    """Mixed in before a layer of ours: another model's biases, query and key norms, scale and residual dropout."""

    q_norm: nn.Module | None
    k_norm: nn.Module | None
    resid_dropout: nn.Module | None

    def take_over(self, source: nn.Module, config: LayerConfig) -> None:
        """Modules of the shape that the source's weights have; the weights themselves come with a state dict."""
        width, heads = self.head_dim, self.num_heads
        if hasattr(source, "c_attn"):  # GPT-2: one fused projection, weights the other way round
            for name in PROJECTIONS:
                setattr(self, name, nn.Linear(config.hidden_size, heads * width, bias=True))
        else:
            for name in PROJECTIONS:
                setattr(self, name, getattr(source, name))
        # Our QK-norm takes the place of the model's own; without it that one stays, learned scale and all.
        self.q_norm = None if self.qk_norm else getattr(source, "q_norm", None)
        self.k_norm = None if self.qk_norm else getattr(source, "k_norm", None)
        self.resid_dropout = getattr(source, "resid_dropout", None)
        if not self.qk_norm:
            self.scale = float(source.scaling)  # type: ignore[arg-type]

    def norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:  # only where our own QK-norm is off
            return self.q_norm(q), self.k_norm(k)
        return super().norm_heads(q, k)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        context: AttentionContext,
        collected: dict[int, Tensor | None] | None = None,
        **others: object,
    ) -> tuple[Tensor, Tensor | None]:
        """As every layer of ours; `others` is what a block of the source passes for its own attention."""
        out, weights = super().forward(hidden_states, context)
        if collected is not None:
            collected[self.layer_idx] = weights
        return out if self.resid_dropout is None else self.resid_dropout(out), weights

    def added_modules(self) -> list[tuple[str, nn.Module]]:
        """What the method has and the source had not."""
        theirs = (*PROJECTIONS, "q_norm", "k_norm", "resid_dropout")
        return [(name, module) for name, module in self.named_children() if name not in theirs]

    @torch.no_grad()
    @guard_torch_init_functions()
    def start_added(self) -> None:
        """Initialise what the source had not; what was loaded is left alone."""
        gate = self.method.gate
        for name, module in self.added_modules():
            if name == gate:
                # A decay of its own for each head (ALiBi's slopes, down to 1/256 per key), the same for all tokens
                # until training makes it depend on them: some heads look near, some far, none is shut.
                slopes = torch.tensor(alibi_slopes(self.num_heads), dtype=torch.float64)
                assert isinstance(module, nn.Linear)
                nn.init.zeros_(module.weight)
                if not reset_bias(module):
                    fill(module.bias, -slopes.expm1().log())  # logsigmoid of it: -slope
            elif isinstance(module, (nn.Linear, RMSNorm)):
                reset_module(module)
            elif isinstance(module, nn.Embedding):
                nn.init.zeros_(module.weight)  # learned positions: none until training makes some
        self.reset_own_parameters()


@cache
def converted_layer(attention: str) -> type[ConvertedAttention]:
    """The layer class of a method that takes over another model's projections."""
    layer = layer_class(attention)
    return type(f"Converted{layer.__name__}", (ConvertedAttention, layer), {"__module__": __name__})


def __getattr__(name: str) -> type[ConvertedAttention]:
    """A converted layer's class by its name, so that models can be pickled."""
    for method in METHODS.values():
        if not method.is_configuration and name == f"Converted{method.layer.partition(':')[2]}":
            return converted_layer(method.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
