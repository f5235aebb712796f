"""One way to look inside a model's attention: `with observe(model) as trace:`.

    with observe(model, weights=True) as trace:
        model(input_ids)
    trace[0].weights          # [B, H, T, Tk] of the first layer
    trace[0].content_scores() # q.k before any position is written into them

Every attention layer adds one `Attended` per forward, in the order in which layers run. The model computes what it
would without being observed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from traformer.layers import AttentionContext, AttentionLayer
from traformer.layers.threshold_relative import ThresholdRelativeAttention
from traformer.methods import OPERATOR
from traformer.ops import AttentionStats
from traformer.ops.eager import content_scores


@dataclass(frozen=True)
class Attended:
    """What one layer was given and returned in one forward. Tk includes the keys of a cache."""

    layer: AttentionLayer
    q: Tensor  # [B, Hq, T, D], positions written in
    k: Tensor  # [B, Hkv, Tk, D]
    v: Tensor  # [B, Hkv, Tk, D]
    hidden_states: Tensor  # [B, T, E]
    context: AttentionContext
    weights: Tensor | None  # [B, Hq, T, Tk] if they were asked for and the method has any
    kept: Tensor | None = None  # bool [B, Hq, T, Tk] where the weights came with it

    def content_scores(self, queries: Tensor | None = None) -> Tensor:
        """q.k * scale of the new tokens by content alone, [B, Hq, T or R, T]; `queries` [R] chooses some of them."""
        q, k, _ = self.layer.project(self.hidden_states)
        return content_scores(q if queries is None else q[:, :, queries], k, self.layer.scale)

    def log_decay(self) -> Tensor | None:
        """Log of the decay that each query applies, [B, Hq, T]; None for methods without such a gate."""
        if not isinstance(self.layer, ThresholdRelativeAttention) or self.layer.decay_proj is None:
            return None
        return self.layer.decays(self.hidden_states)

    def keep(self) -> Tensor | None:
        """Which keys stay in the softmax, bool [B, Hq, T, Tk]; None for methods that remove none."""
        if self.kept is not None:
            return self.kept
        keeps = getattr(self.layer, "keeps", None)
        return None if keeps is None else keeps(self.q, self.k, self.hidden_states, self.context)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """q, k, v and log decay as TRA's operator takes them; None for methods that it does not compute."""
        if not isinstance(self.layer, ThresholdRelativeAttention) or self.layer.method.path != OPERATOR:
            return None
        q = self.layer.queries(self.q, self.k, self.context)
        return q, self.k, self.v, self.layer.decays(self.hidden_states)

    def reads(self) -> AttentionStats | None:
        """How many keys each query read and kept; None for methods that do not count them."""
        if not isinstance(self.layer, ThresholdRelativeAttention) or self.layer.method.path != OPERATOR:
            return None
        return self.layer.reads(self.q, self.k, self.hidden_states, self.context)


@contextmanager
def observe(
    model: nn.Module, *, weights: bool = False, visit: Callable[[Attended], None] | None = None
) -> Iterator[list[Attended]]:
    """Collect what the attention layers of a model do while inside.

    `weights` asks for the attention weights. With `visit`, each layer is handed over as it runs and nothing is kept, so
    that a long sequence never has the maps of all layers in memory at once.
    """
    trace: list[Attended] = []
    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    for layer in layers:
        layer.attend = _observed(layer, weights, visit or trace.append)  # type: ignore[method-assign]
    try:
        yield trace
    finally:
        for layer in layers:
            del layer.attend  # the class's own shows again


def _observed(
    layer: AttentionLayer, with_weights: bool, visit: Callable[[Attended], None]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    attend = layer.attend
    whole_map = layer.whole_map if isinstance(layer, ThresholdRelativeAttention) else None

    def observed(
        q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext, *state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        # Weights and kept keys are parts of one map: it is made once for both. In training, where thresholds may be
        # drawn, the layer's own weights belong to its own draw.
        once = with_weights and not (layer.training or context.output_attentions)
        if once and whole_map is not None and (found := whole_map(q, k, hidden_states, context)) is not None:
            out, _ = attend(q, k, v, hidden_states, context, *state)
            visit(Attended(layer, q, k, v, hidden_states, context, found.weights, found.keep))
            return out, None
        asked = dataclasses.replace(context, output_attentions=context.output_attentions or with_weights)
        out, weights = attend(q, k, v, hidden_states, asked, *state)
        visit(Attended(layer, q, k, v, hidden_states, context, weights))
        return out, weights if context.output_attentions else None

    return observed
