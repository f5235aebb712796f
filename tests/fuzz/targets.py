"""What is fuzzed: each target draws a case and checks what must hold for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz import generators, layers, readers
from tests.ops import drawn
from tests.ops.cases import FUSED

Case = Any


@dataclass(frozen=True)
class Target:
    """share: its part of the campaign's problems, relative to the others."""

    name: str
    share: int
    cases: st.SearchStrategy[Case]
    check: Callable[[Case], None]


_LONGEST = 80  # queries: past one block of every backend
# One way to run per problem, so that a problem costs the same on machines with few and with many instruction sets.
_variant = st.sampled_from([variant for name in FUSED for variant in drawn.variants(name)]).map(lambda name: [name])
_indexed = st.sampled_from([*drawn.variants("cpu")] or ["blockwise"]).map(lambda name: [name])
_problem = drawn.problems(_LONGEST)

OPERATORS = (
    Target("operator/formula", 6, st.tuples(_problem, _variant), lambda case: drawn.check_formula(*case)),
    Target(
        "operator/not_finite", 6, st.tuples(drawn.not_finite_problems(_LONGEST), _variant),
        lambda case: drawn.check_not_finite(*case[0], case[1]),
    ),
    Target(
        "operator/dropout", 4,
        st.tuples(_problem, st.floats(0.01, 0.95), st.integers(-(2**63), 2**63 - 1), _variant),
        lambda case: drawn.check_dropout(*case),
    ),
    Target(
        "operator/half", 4, st.tuples(_problem, st.sampled_from([torch.bfloat16, torch.float16]), _variant),
        lambda case: drawn.check_half(*case),
    ),
    *([Target("operator/decode", 4, st.tuples(drawn.problems(12), _indexed), lambda case: drawn.check_decode(*case))]
      if "cpu" in FUSED else []),
)  # fmt: skip
TARGETS = {
    target.name: target
    for target in (
        *OPERATORS,
        Target("layer/cache", 3, layers.cache_cases(), layers.check_cache),
        Target("layer/padding", 3, layers.padding_cases(), layers.check_padding),
        Target("generator/examples", 15, generators.example_cases(), generators.check_examples),
        Target("generator/settings", 10, generators.setting_cases(), generators.check_settings),
        Target("reader/config.yaml", 10, readers.config_cases(), readers.check_config),
        Target("reader/metrics.jsonl", 8, readers.metrics_cases(), readers.check_metrics),
        Target("reader/results.json", 9, readers.results_cases(), readers.check_results),
        Target("reader/checkpoint", 6, readers.checkpoint_cases(), readers.check_checkpoint),
        Target("reader/token_cache", 6, readers.cache_cases(), readers.check_token_cache),
        Target("reader/tokenizer", 6, readers.tokenizer_cases(), readers.check_tokenizer),
    )
}
