"""The one loss: cross-entropy of the answer tokens, each predicted from the position before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from traformer.models.loss import linear_cross_entropy


def answer_logits(model: Any, input_ids: Tensor, answers: Tensor) -> Tensor:
    """Logits [N, V] that predict the N answer tokens, in row order; the head runs on these N positions only.

    No mask is given: rows are padded on the right and attention is causal, so no real position sees padding.
    """
    logits: Tensor = model.get_output_embeddings()(answer_states(model, input_ids, answers))  # [N, E] -> [N, V]
    return logits


def answer_states(model: Any, input_ids: Tensor, answers: Tensor) -> Tensor:
    """The hidden states [N, E] that the N answer tokens are predicted from."""
    hidden: Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, T, E]
    return hidden[:, :-1][answers[:, 1:]]


class AnswerLoss(nn.Module):
    """A causal language model together with its loss: what data-parallel wrappers wrap."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def parts_to_shard(self) -> list[nn.Module]:
        """What FSDP shards one by one: the decoder's blocks."""
        return list(self.model.base_model.blocks)

    def forward(self, input_ids: Tensor, answers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum of the answer tokens' losses, and how many of them the argmax gets right (both 0-dim)."""
        hidden, targets = answer_states(self.model, input_ids, answers), input_ids[:, 1:][answers[:, 1:]]
        return linear_cross_entropy(hidden, self.model.get_output_embeddings().weight, targets)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A seed for torch's generators that differs for every (seed, step, rank); splitmix64's mixing of the three."""
    state = 0
    for value in (seed, step, rank):
        state = (state + value + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1  # torch takes it as a signed 64-bit number


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch for one step, so that dropout needs no saved state to be repeated."""
    torch.manual_seed(step_seed(seed, step, rank))
