"""Scores of predictions, and what they say about the model: proportions with 95 % intervals.

Teacher-forced, an example is an exact match when every answer token is the argmax; greedy decoding then gives the
same tokens, so accuracy needs no generation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING

from traformer.errors import InputError

if TYPE_CHECKING:
    import torch

    from traformer.tasks.base import Batch


@dataclasses.dataclass(frozen=True)
class Proportion:
    """A share with its interval, and the number of things it was counted on."""

    value: float
    low: float
    high: float
    count: int


def wilson(successes: float, total: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion; two-sided."""
    _check(successes, total)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    reach = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low = 0.0 if successes == 0 else max(0.0, centre - reach)
    high = 1.0 if successes == total else min(1.0, centre + reach)
    return low, high


def upper_bound(events: int, total: int, confidence: float = 0.95) -> float:
    """The Clopper-Pearson upper bound of a rate, one-sided: with no event in n trials 1 - 0.05**(1/n), about 3 / n."""
    _check(events, total)
    if events == total:
        return 1.0
    if events == 0:
        return -math.expm1(math.log1p(-confidence) / total)
    # The rate at which `events` or fewer would be seen with probability 1 - confidence; that falls as the rate grows.
    low, high = events / total, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if binomial_cdf(events, total, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
        if high - low <= 1e-15 * high:
            break
    return high


def binomial_cdf(events: int, total: int, rate: float) -> float:
    """Probability of at most `events` in `total` trials, for 0 < rate < 1; summed over the shorter tail."""
    if events > total * rate:
        return 1.0 - _tail(total - events - 1, total, 1.0 - rate)
    return _tail(events, total, rate)


def _tail(events: int, total: int, rate: float) -> float:
    """P(X <= events), summed downwards from the largest term until the rest no longer counts."""
    if events < 0:
        return 0.0
    if rate >= 1.0:
        return 1.0 if events >= total else 0.0
    log_term = (
        math.lgamma(total + 1) - math.lgamma(events + 1) - math.lgamma(total - events + 1)
        + events * math.log(rate) + (total - events) * math.log1p(-rate)
    )  # fmt: skip
    term, total_share = 1.0, 1.0
    for k in range(events, 0, -1):
        term *= k / (total - k + 1) * (1 - rate) / rate
        total_share += term
        if term < 1e-17 * total_share:
            break
    return math.exp(log_term) * total_share


def _check(successes: float, total: float) -> None:
    if not 0 <= successes <= total or total <= 0:
        raise InputError(f"{successes} of {total} is no proportion; give 0 <= successes <= total and a total above 0")


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per example: tokens scored, and how many of them were right."""

    correct: torch.Tensor  # int64 [n]
    scored: torch.Tensor  # int64 [n]

    @property
    def exact(self) -> torch.Tensor:
        """bool [n], every scored token right."""
        return self.correct == self.scored


def score(predicted: torch.Tensor, batch: Batch) -> Scores:
    """Compare predicted ids [n, T] with a batch; predicted[:, t] is the guess for the token at t.

    Only positions where `batch.answers` is set are looked at.
    """
    if predicted.shape != batch.input_ids.shape:
        shapes = f"{tuple(predicted.shape)}, the batch {tuple(batch.input_ids.shape)}"
        raise InputError(f"predicted has shape {shapes}; give one id per token of the batch")
    right = (predicted == batch.input_ids) & batch.answers
    return Scores(right.sum(dim=1), batch.answers.sum(dim=1))


@dataclasses.dataclass
class Tally:
    """Running sums over scored examples, enough for every metric and its interval."""

    examples: int = 0
    exact: int = 0
    tokens: int = 0
    correct: int = 0
    # Sums over examples of correct**2, correct * tokens and tokens**2.
    _correct_squared: int = 0
    _cross: int = 0
    _tokens_squared: int = 0

    def add(self, scores: Scores) -> None:
        """Count the examples of one batch."""
        correct, scored = scores.correct.long(), scores.scored.long()
        self.examples += correct.numel()
        self.exact += int(scores.exact.sum())
        self.tokens += int(scored.sum())
        self.correct += int(correct.sum())
        self._correct_squared += int((correct * correct).sum())
        self._cross += int((correct * scored).sum())
        self._tokens_squared += int((scored * scored).sum())

    def __add__(self, other: Tally) -> Tally:
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return Tally(*(mine + theirs for mine, theirs in pairs))

    def exact_match(self) -> Proportion:
        """Share of examples with every answer token right; Wilson interval."""
        return Proportion(self.exact / max(self.examples, 1), *wilson(self.exact, self.examples), self.examples)

    def token_accuracy(self) -> Proportion:
        """Share of answer tokens that are right; Wilson interval on the effective number of tokens.

        Errors of one sequence come together, so tokens are not independent: their number is divided by how much
        wider the share varies from sequence to sequence than independent tokens would. Where nothing varies (all
        right or all wrong) each sequence counts once.
        """
        _check(self.correct, self.tokens)
        share = self.correct / self.tokens
        effective = float(min(self.examples, self.tokens))
        if 0 < self.correct < self.tokens and self.examples > 1:
            spread = self._correct_squared - 2 * share * self._cross + share * share * self._tokens_squared
            variance = spread * self.examples / (self.examples - 1) / self.tokens**2
            if variance > 0:
                effective = min(share * (1 - share) / variance, float(self.tokens))
        return Proportion(share, *wilson(share * effective, effective), self.tokens)

    def error_per_answer(self) -> Proportion:
        """Wrong answer tokens (flip_flop: reads) per answer token; low is 0 and high the 95 % upper bound.

        The bound takes answers as independent; after no error in n of them it is about 3 / n.
        """
        errors = self.tokens - self.correct
        _check(errors, self.tokens)
        return Proportion(errors / self.tokens, 0.0, upper_bound(errors, self.tokens), self.tokens)


# Name of a metric -> how a tally answers it; tasks name those that they report.
ANSWER_METRICS: dict[str, Callable[[Tally], Proportion]] = {
    "exact_match": Tally.exact_match,
    "token_accuracy": Tally.token_accuracy,
    "error_per_read": Tally.error_per_answer,
}
