"""recall against its definition, example by example."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traformer.errors import InputError
from traformer.tasks import Recall, Task

PAD, BOS, SEP = 0, 1, 2
KEY = 4
WORDS = "the quick brown fox jumps over the lazy dog and runs "


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall")
    cache = folder / "cache"
    (folder / "text").mkdir()
    text = "".join(f"{number} {WORDS}" for number in range(400))
    (folder / "text" / "a.train.txt").write_text(text)
    (folder / "text" / "b.valid.txt").write_text(text.upper())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAFORMER_CACHE", str(cache))
        yield str(folder / "text")


def check(task: Recall, seed: int, start: int, count: int) -> None:
    """Read every example as a person would: pairs from the context, then each query's value from the pairs."""
    value, first_byte = KEY + task.keys, KEY + task.keys + task.values
    text = "" if not task.data else bytes(task._filler("train").tokens.astype(np.uint8)).decode()
    batch = task.examples(seed, start, count)
    for row, tokens in enumerate(batch.lengths.tolist()):
        ids, answers, sources = (x[row].tolist() for x in (batch.input_ids, batch.answers, batch.sources))
        assert ids[tokens:] == [PAD] * (len(ids) - tokens) and not any(answers[tokens:])
        assert ids[0] == BOS and ids.count(SEP) == 1
        end = ids.index(SEP)
        pairs, filler, t = {}, [], 1
        while t < end:
            if ids[t] < first_byte:
                assert KEY <= ids[t] < value <= ids[t + 1] < first_byte and ids[t] not in pairs
                pairs[ids[t]] = (ids[t + 1], t + 1)
                t += 2
            else:
                filler.append(ids[t] - first_byte)
                t += 1
        assert task.pairs_range[0] <= len(pairs) <= task.pairs_range[1]
        low, high = task.length_range
        assert (low <= tokens <= high) if task.data else tokens == 4 * len(pairs) + 2
        assert bytes(filler).decode() in text
        queries = ids[end + 1 : tokens]
        assert sorted(queries[0::2]) == sorted(pairs)
        assert [(v, s) for v, s in zip(queries[1::2], sources[end + 2 : tokens : 2], strict=True)] == [
            pairs[k] for k in queries[0::2]
        ]
        assert [t for t, scored in enumerate(answers) if scored] == list(range(end + 2, tokens, 2))
        assert all(source == -1 for t, source in enumerate(sources) if not answers[t])


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**62 - 1), start=st.integers(0, 2**40))
def test_definition_in_text(data, seed, start):
    check(Recall(data=data, length=64, min_length=20, pairs=6), seed, start, 8)
    check(Recall(data=data, length=26, pairs=6, min_pairs=6, keys=6), seed, start, 4)  # no byte of text has a place


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**62 - 1), start=st.integers(0, 2**40))
def test_definition_without_text(seed, start):
    check(Recall(data=(), length=66, min_length=10, keys=16, values=4), seed, start, 8)


def test_the_same_example_however_it_is_asked_for(data):
    task = Recall(data=data, length=64, min_length=20, pairs=6)
    whole = task.examples(3, 100, 12)
    for index in (100, 105, 111):
        alone = task.examples(3, index, 1)
        n = int(alone.lengths[0])
        assert int(whole.lengths[index - 100]) == n
        for name in ("input_ids", "answers", "sources"):
            assert getattr(alone, name)[0, :n].equal(getattr(whole, name)[index - 100, :n])


def test_test_seeds_draw_from_the_validation_text(data):
    task = Recall(data=data, length=64)
    decoded = task.decode(task.examples(Task.test_seed(1), 0, 1).input_ids[0])
    assert any(letter in decoded.split() for letter in "QUICK") and "q" not in decoded.split()


def test_places_are_spread_over_the_context(data):
    task = Recall(data=data, length=64, pairs=4, min_pairs=4)
    batch = task.examples(0, 0, 2000)
    places = (batch.sources[batch.answers].double() - 2) / 52  # values stand at 2 .. 54
    assert places.mean() == pytest.approx(0.5, abs=0.02) and places.std() == pytest.approx(12**-0.5, abs=0.02)
    asked_first = batch.sources[:, 57]
    assert asked_first.double().mean() == pytest.approx(28, abs=1.0)  # no order in how the keys are asked for


def test_two_ways_to_grow(data):
    task = Recall(data=data, length=64, min_length=32, pairs=4, keys=16)
    splits = [(s.name, s.length, s.task.pairs_range) for s in task.test_splits("64,128,256,512")]
    assert splits == [
        ("fixed", "64", (4, 4)),
        ("fixed", "128", (4, 4)),
        ("growing", "128", (8, 8)),
        ("fixed", "256", (4, 4)),
        ("growing", "256", (16, 16)),
        ("fixed", "512", (4, 4)),  # 32 pairs would need as many keys
    ]
    for split in task.test_splits("512"):
        batch = split.task.examples(Task.test_seed(0), 0, 3)
        assert batch.input_ids.shape == (3, 512) and split.task.vocab_size == task.vocab_size
    assert [pair[0] for pair in Recall(data=data).default_test_lengths()] == [128 << power for power in range(10)]
    assert [s.length for s in Recall(data=(), length=18, keys=32).test_splits()] == ["18", "36", "72"]


def test_chance_is_that_of_the_values_without_their_keys():
    task = Recall(data=(), length=18, min_length=18, values=4)  # four pairs, four values
    batch = task.examples(0, 0, 20_000)
    answered = batch.input_ids[batch.answers].reshape(len(batch), 4)
    commonest = answered.mode(dim=1).values[:, None]
    assert task.chance("token_accuracy") == pytest.approx((answered == commonest).double().mean().item(), abs=0.01)
    other = Recall(data=(), length=18, min_length=18, values=4).examples(1, 0, 20_000)
    generator = np.random.default_rng(0)
    shuffled = generator.permuted(other.input_ids[other.answers].reshape(len(other), 4).numpy(), axis=1)
    exact = (shuffled == other.input_ids[other.answers].reshape(len(other), 4).numpy()).all(axis=1).mean()
    assert task.chance() == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data": "x", "length": 16, "pairs": 4}, "4 pairs and their queries need 18 tokens"),
        ({"data": "x", "length": 64, "min_length": 8, "pairs": 4, "min_pairs": 4}, "need 18 tokens"),
        ({"data": "x", "pairs": 8, "keys": 4}, "8 pairs need as many keys"),
        ({"data": [], "length": 66, "keys": 4}, "16 pairs need as many keys"),
        ({"data": [], "pairs": 4}, "the length decides"),
        ({"data": [], "min_pairs": 10}, "min_pairs is for recall in text; .* the length decides"),
        ({"data": "x", "length": 64, "min_pairs": 9}, "min_pairs 9 is greater than pairs 4"),
        ({"values": 1}, "needs no recall"),
        ({"data": 3}, "data must be a path"),
        ({"length": 5}, "at least 6 tokens"),
    ],
)
def test_settings_that_make_no_sense(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        Recall(**settings)


def test_the_built_in_text_is_stored_with_its_version():
    task = Recall()
    assert task.data != () and task.data == tuple(Recall.stored_options({})["data"]) != ("python-stdlib",)
    assert Recall.stored_options({"data": []}) == {"data": []}
    assert "python-stdlib" in Recall.notice({}) and Recall.notice({"data": []}) is None


def test_text_too_short_for_the_length(data):
    with pytest.raises(InputError, match="too few for examples of 1,048,576 tokens"):
        Recall(data=data, length=1 << 20).prepare()
