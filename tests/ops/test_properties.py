"""Every fused backend against the eager formula over drawn problems, on every instruction set that this machine has.

`make sanitize` runs this file on a build of the kernel with AddressSanitizer and UBSan.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.ops import drawn
from tests.ops.cases import FUSED
from tests.ops.drawn import not_finite_problems, problems

fused = pytest.mark.parametrize("backend", FUSED)
many = settings(max_examples=25)


@fused
@seed(1)
@many
@given(problem=problems())
def test_equals_the_formula(backend, problem):
    drawn.check_formula(problem, drawn.variants(backend))


@fused
@seed(2)
@settings(max_examples=50)
@given(drawn_problem=not_finite_problems())
def test_what_is_not_finite_stays_in_the_rows_that_see_it(backend, drawn_problem):
    drawn.check_not_finite(*drawn_problem, drawn.variants(backend))


@fused
@seed(3)
@many
@given(problem=problems(), p=st.floats(0.05, 0.9), dropout_seed=st.integers(-(2**62), 2**62))
def test_dropout_draws_the_same_mask(backend, problem, p, dropout_seed):
    drawn.check_dropout(problem, p, dropout_seed, drawn.variants(backend))


@fused
@seed(4)
@many
@given(problem=problems(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_storage(backend, problem, dtype):
    drawn.check_half(problem, dtype, drawn.variants(backend))


@pytest.mark.skipif("cpu" not in FUSED, reason="the compiled backend is not here")
@seed(5)
@many
@given(problem=problems(longest=12))
def test_a_key_index_changes_nothing(problem):
    drawn.check_decode(problem, drawn.variants("cpu"))


def test_the_same_problems_are_drawn_on_every_machine():
    """A digest of what the tests above draw. Change it only together with the drawing itself."""
    digest = hashlib.sha256()

    @seed(1)
    @many
    @given(problem=problems())
    def record(problem):
        digest.update(repr([list(x.shape) for x in problem.inputs]).encode())
        digest.update(repr((sorted(problem.options), problem.options["query_start"], problem.threads)).encode())
        for x in problem.inputs:
            # numpy's log may differ in its last bit between builds: six digits of the first elements are the same
            digest.update(" ".join(f"{value:.5g}" for value in x.flatten()[:8].tolist()).encode())

    record()
    assert digest.hexdigest()[:16] == "6e6d054474c644de"
