"""algorithmic against plain Python, example by example."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traformer.errors import InputError
from traformer.tasks import Algorithmic
from traformer.tasks.algorithmic import PROBLEMS


def solve(problem: str, x: list[str]) -> list[str]:
    """The answer to a string of token names, as the definition says it."""
    match problem:
        case "parity":
            return [str(x.count("1") % 2)]
        case "majority":
            return ["1" if 2 * x.count("1") > len(x) else "0"]
        case "cycle_navigation":
            return [str((x.count("right") - x.count("left")) % 5)]
        case "modular_arithmetic":
            return [str(eval("".join(x)) % 5)]
        case "reverse":
            return x[::-1]
        case "sort":
            return sorted(x)
        case "two_back":
            return ["a", "a", *x][: len(x)]
        case "recall":
            end = x.index("?")
            pairs = {tuple(x[at : at + 2]): x[at + 2 : at + 4] for at in range(0, end, 5)}
            assert len(pairs) == end // 5 and set(x[4:end:5]) == {"|"} and set(x[end::3]) == {"?"}
            asked = [tuple(x[at + 1 : at + 3]) for at in range(end, len(x), 3)]
            assert len(set(asked)) == len(asked) == min(len(pairs), 4)
            return [letter for key in asked for letter in pairs[key]]
    stack: list[str] = []
    for token in x:
        if token == "pop":
            stack = stack[:-1]
        else:
            stack.append(token[-1])
    return stack[::-1]


@pytest.mark.parametrize("problem", PROBLEMS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**62), start=st.integers(0, 2**40), shortest=st.integers(1, 9), more=st.integers(0, 9))
def test_definition(problem, seed, start, shortest, more):
    task = Algorithmic(problem, shortest + more, shortest)
    batch = task.examples(seed, start, 8)
    assert batch.input_ids.shape[1] <= task.sequence_length
    for row, tokens in enumerate(batch.lengths.tolist()):
        words = task.decode(batch.input_ids[row]).split()
        assert len(words) == tokens
        at = words.index("<sep>")
        x, y = words[1:at], words[at + 1 : -1]
        assert words[0] == "<bos>" and words[-1] == "<eos>" and y == solve(problem, x)
        even = problem == "modular_arithmetic" and shortest % 2 == 0
        if problem == "recall":
            assert max(8, shortest - 7) <= len(x) <= max(8, shortest + more)
        else:
            assert shortest - even <= len(x) <= shortest + more
        scored = [t for t, answer in enumerate(batch.answers[row].tolist()) if answer]
        assert scored == list(range(at + 1, tokens))
        for number, t in enumerate(scored[:-1]):
            source = int(batch.sources[row, t])
            if problem == "reverse":
                assert words[source] == words[t] and source == 2 * at - t
            elif problem == "recall":
                assert words[source] == words[t] and source < at
            elif problem == "two_back":
                assert source == (number - 1 if number >= 2 else -1)
            else:
                assert source == -1


@pytest.mark.parametrize("problem", PROBLEMS)
def test_random_access_and_buckets(problem):
    task = Algorithmic(problem, 12)
    whole, alone = task.examples(1, 0, 9), task.examples(1, 8, 1)
    n = int(alone.lengths[0])
    assert alone.input_ids[0, :n].equal(whole.input_ids[8, :n])
    assert [split.length for split in Algorithmic(problem).test_splits()][:3] == ["1-50", "51-100", "101-150"]
    assert [split.length for split in Algorithmic(problem).test_splits()][-1] == "451-500"


def test_every_answer_is_as_likely_as_chance_says():
    for problem, share in (("parity", 0.5), ("cycle_navigation", 0.2)):
        task = Algorithmic(problem, 40, 40)
        batch = task.examples(0, 0, 20_000)
        given = batch.input_ids[:, 42].bincount().double() / len(batch)
        assert float(given.max()) == pytest.approx(share, abs=0.02) and task.chance() == share
    assert Algorithmic("reverse", 2, 2).chance() == pytest.approx(0.01)
    assert Algorithmic("two_back", 4, 4).chance() == pytest.approx(0.01)
    assert Algorithmic("recall", 8, 8).chance() == pytest.approx(1 / 256)


def test_recall_has_as_many_pairs_as_it_has_keys():
    assert len(Algorithmic("recall", 1292, 1292).examples(0, 0, 1)) == 1
    with pytest.raises(InputError, match="256 keys"):
        Algorithmic("recall", 1297)


def test_unknown_problem():
    with pytest.raises(InputError, match="parity"):
        Algorithmic("primes")
