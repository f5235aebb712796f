"""The property tests of the other backends (tests/ops/drawn.py) at small shapes."""

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.ops import drawn
from tests.ops.drawn import Drawn, not_finite_problems, problems

LONGEST = 70
BACKEND = ["triton"]
few = settings(max_examples=2)
many = settings(max_examples=12)


def moved(problem: Drawn) -> Drawn:
    """The same problem on the GPU, where there is one."""
    if not torch.cuda.is_available():
        return problem
    options = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in problem.options.items()}
    return Drawn([x.cuda() for x in problem.inputs], options, problem.threads, problem.upstream.cuda())


@seed(1)
@few
@given(problem=problems(longest=40))
def test_equals_the_formula(problem):
    drawn.check_formula(moved(problem), BACKEND)


@pytest.mark.slow
@seed(6)
@many
@given(problem=problems(longest=LONGEST))
def test_equals_the_formula_often(problem):
    drawn.check_formula(moved(problem), BACKEND)


@pytest.mark.slow
@seed(2)
@many
@given(drawn_problem=not_finite_problems(longest=LONGEST))
def test_what_is_not_finite_stays_in_the_rows_that_see_it(drawn_problem):
    clean, dirty, bad_value = drawn_problem
    drawn.check_not_finite(moved(clean), moved(dirty), bad_value.to(moved(clean).inputs[0].device), BACKEND)


@pytest.mark.slow
@seed(3)
@many
@given(problem=problems(longest=LONGEST), p=st.floats(0.05, 0.9), dropout_seed=st.integers(-(2**62), 2**62))
def test_dropout_draws_the_same_mask(problem, p, dropout_seed):
    drawn.check_dropout(moved(problem), p, dropout_seed, BACKEND)


@pytest.mark.slow
@seed(4)
@many
@given(problem=problems(longest=LONGEST), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_storage(problem, dtype):
    drawn.check_half(moved(problem), dtype, BACKEND)


@pytest.mark.slow
@seed(5)
@many
@given(problem=problems(longest=12))
def test_a_key_index_changes_nothing(problem):
    drawn.check_decode(moved(problem), BACKEND)
