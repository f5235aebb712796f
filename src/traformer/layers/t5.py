"""T5's relative position bias."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.context import AttentionContext
from traformer.layers.options import SoftmaxArguments
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.t5 import t5_buckets
from traformer.types import Options


class T5BiasAttention(SoftmaxAttentionLayer):
    """Softmax attention with T5's learned bias for each head and bucket of distances, shared by all layers.

    Source: Raffel et al. 2020. Causal buckets: 32, half of them exact, the others logarithmic up to 128, one for all
    beyond. The table (buckets x heads) is the first such layer's and serves all, as in T5; it starts normal with std
    width^-0.5, as there.
    Choice: scores keep the factor 1/sqrt(d) of the common trunk, which T5 folds into its initialisation.
    Path: torch's attention with the bias as a float mask; distances are put into buckets once per forward.

    Options: buckets, max_distance.
    """

    name = "t5"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        **more: Unpack[SoftmaxArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, buckets=buckets, max_distance=max_distance, **more)

    def add_parameters(self) -> None:
        super().add_parameters()
        self.table_std = self.embed_dim**-0.5
        self.bias_table: nn.Parameter | None = None
        if self.layer_idx == self.leader:
            self.bias_table = nn.Parameter(torch.zeros(self.option["buckets"], self.num_heads))

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        buckets, far = options["buckets"], options["max_distance"]
        if not (isinstance(buckets, int) and isinstance(far, int) and 4 <= buckets < 2 * far):
            raise InputError(
                "attention options buckets and max_distance must be whole numbers, 4 <= buckets < 2 * max_distance, "
                f"not {buckets!r} and {far!r}"
            )

    def reset_own_parameters(self) -> None:
        super().reset_own_parameters()
        if self.bias_table is not None:
            nn.init.normal_(self.bias_table, std=self.table_std)

    def make_tables(self, context: AttentionContext, hidden_states: Tensor) -> tuple[Tensor, ...]:
        distances = context.distances(hidden_states.shape[1], hidden_states.device)
        buckets = t5_buckets(distances, self.option["buckets"], self.option["max_distance"])
        assert self.bias_table is not None  # the leader has it
        # The table itself, not the bias made of it: what a checkpointed block computes again must start from
        # parameters.
        return buckets, self.bias_table

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        buckets, table = self.tables(context)
        bias = F.embedding(buckets, table).permute(0, 3, 1, 2)  # [B or 1, H, T, Tk]
        return self.softmax_attention(q, k, v, context, self.scale, bias)
