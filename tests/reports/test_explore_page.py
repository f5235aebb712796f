"""The page of `tra explore`: self-contained, its numbers those of the attention maps, hostile text stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.evaluation.exploration import decode_kept, decode_rows
from traformer.evaluation.explore import explore_model, explore_runs
from traformer.evaluation.opened import OpenedRun
from traformer.models.observe import observe
from traformer.ops import attention_map
from traformer.reports.explore import explore_page
from traformer.training.loop import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind: one that removes keys, a peer, a named configuration, and one without weights."""
    folder = tmp_path_factory.mktemp("runs")
    for attention in ("tra", "rope", "tra_plus", "lstm"):
        train(tiny_config(attention=attention, steps=2), folder / attention, quiet=True)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama of words, and the same converted, each saved with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from traformer import convert

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    settings = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **settings))
    places = {name: tmp_path_factory.mktemp(name) for name in ("plain", "converted")}
    for name, model in (("plain", llama), ("converted", convert(llama, ["rope", "tra_plus"]))):
        model.save_pretrained(places[name])
        tokenizer.save_pretrained(places[name])
    return places


def test_a_converted_model_with_its_tokenizer(saved: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["explore", str(saved["converted"]), "--prompt", "a b c c a", "--out", str(out)]) == 0
    data = data_of(out.read_text(encoding="utf-8"))
    (run,) = data["runs"]
    assert data["vocabulary"] == {"1": "a", "2": "b", "3": "c"} and run["label"] == "RoPE + tra_plus"
    rope, tra_plus = run["views"][0]["layers"]
    assert len(rope) == len(tra_plus) == 4 and rope[0]["kept"] is None and tra_plus[0]["kept"]


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("attention", ["tra", "tra_plus"])
def test_the_page_has_the_numbers_of_attention_map(runs: dict[str, Path], attention: str) -> None:
    run = OpenedRun.open(runs[attention])
    exploration = explore_runs([runs[attention]], lengths="16")
    view = exploration.runs[0].views[0]
    with observe(run.model) as trace, torch.inference_mode():
        run.model(torch.tensor([view.tokens]))
    for seen, heads in zip(trace, view.layers, strict=True):
        with torch.inference_mode():
            q, log_decay, options, _ = seen.layer._problem(seen.q, seen.k, seen.hidden_states, seen.context)  # type: ignore[operator]
            exact = attention_map(q, seen.k, log_decay, **options)
        for head, coded in enumerate(heads):
            kept = decode_kept(coded, view)
            assert kept is not None
            rows = decode_rows(coded, view)
            for row, query in enumerate(view.queries):
                assert kept[row].tolist() == exact.keep[0, head, query].tolist()
                weights = exact.weights[0, head, query].tolist()
                for key, weight in enumerate(weights):
                    assert rows[row].get(key, 0.0) == pytest.approx(weight, abs=1.1e-4)


def test_runs_side_by_side_on_the_same_sequences(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["explore", str(runs["tra"]), str(runs["rope"]), "--lengths", "16,32", "--out", str(out)]) == 0
    data = data_of(out.read_text(encoding="utf-8"))
    tra, rope = data["runs"]
    assert (tra["label"], rope["label"]) == ("TRA", "RoPE")
    assert [view["tokens"] for view in tra["views"]] == [view["tokens"] for view in rope["views"]]
    assert tra["views"][0]["layers"][0][0]["kept"] and rope["views"][0]["layers"][0][0]["kept"] is None
    assert [len(view["tokens"]) for view in tra["views"]] == [16, 32]
    assert len(tra["growth"]) == 2


def test_longer_inputs_are_the_same_example_with_more_that_is_irrelevant(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traformer.evaluation.explore.MOST_SEQUENCES", 1)
    exploration = explore_runs([runs["tra"]], lengths="16,32,64")
    assert exploration.is_grown
    short, *longer = exploration.runs[0].views
    for view, growth in zip(longer, exploration.runs[0].growth[1:], strict=True):
        added = len(view.tokens) - 16
        assert view.tokens[:14] + view.tokens[14 + added :] == short.tokens
        assert set(view.tokens[14:-2:2]) == {3}  # ignore
        # The figure is of the last answer, and agrees with what the page shows of each head there.
        row, keys = view.queries.index(len(view.tokens) - 2), view.sources[-1]
        most = max(
            sum(decode_rows(head, view)[row].get(key, 0.0) for key in keys) for heads in view.layers for head in heads
        )
        assert growth.weight == pytest.approx(most, abs=3e-4) and growth.sequences == 1
        assert growth.right == float(view.answers[-1].predicted == view.answers[-1].truth)
    page = explore_page(exploration).html
    assert "Each length has the same examples" in page and page.count('class="plot"') == 2


def test_a_task_that_cannot_grow_has_other_examples(tmp_path: Path) -> None:
    train(tiny_config(task="copy", task_options={"max_length": 6}, steps=2), tmp_path / "copy", quiet=True)
    exploration = explore_runs([tmp_path / "copy"], lengths="3,6")
    assert not exploration.is_grown and "Each length has examples of its own" in explore_page(exploration).html


def test_long_inputs_are_few_and_the_page_says_so(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traformer.evaluation.explore.MOST_CELLS", 16 * 32**2 - 1)
    page = explore_page(explore_runs([runs["tra"]], lengths="16,32,128")).html
    assert "Means over 16 sequences (15 at 32 tokens, 1 at 128 tokens)." in page


def test_nothing_is_loaded_from_elsewhere(runs: dict[str, Path]) -> None:
    page = explore_page(explore_runs([runs["tra"]], lengths="16")).html
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)


def test_hostile_text_stays_text(runs: dict[str, Path]) -> None:
    model = OpenedRun.open(runs["tra"]).model
    evil = '</script><img src=x onerror="alert(1)">'
    page = explore_page(explore_model(model, [1, 4, 2, 4], decode=lambda ids: evil, title=evil)).html
    assert "</script><img" not in page and "<img" not in page
    assert data_of(page)["vocabulary"]["1"] == evil


def test_a_prompt_instead_of_an_example(runs: dict[str, Path]) -> None:
    view = explore_runs([runs["tra"]], prompt="w 1 i 0 r").runs[0].views[0]
    assert len(view.tokens) == 5 and not view.answers


def test_a_page_of_many_tokens_stays_small(runs: dict[str, Path]) -> None:
    page = explore_page(explore_runs([runs["tra"], runs["rope"]], lengths="2k")).html
    assert len(page.encode()) < 5_000_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["LSTM"], "weighs no keys, so there is nothing to explore"),
        (["TRA", "--split", "sparce"], "unknown split of flip_flop 'sparce'; did you mean 'sparse'?"),
        (["TRA", "--task-example", "-1"], "the example's number is -1"),
        (["TRA", "--prompt", ""], "the prompt is empty"),
        (["SAVED"], "is a saved model without a task; give a --prompt"),
        (["SAVED", "--prompt", "a b", "--step", "3"], "has no checkpoints; leave --step out"),
        (["PLAIN", "--prompt", "a b"], "has none of our attention layers; convert it first"),
        (["TRA", "SAVED", "--prompt", "w 1 r"], "has other tokens than"),
        (["TRA", "--lengths", "4m"], "of memory"),
        (["NOWHERE"], "there is no run folder"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_sentence(
    arguments: list[str],
    sentence: str,
    runs: dict[str, Path],
    saved: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"TRA": str(runs["tra"]), "LSTM": str(runs["lstm"]), "NOWHERE": str(tmp_path / "nowhere")}
    places |= {"SAVED": str(saved["converted"]), "PLAIN": str(saved["plain"])}
    out = tmp_path / "page.html"
    assert main(["explore", *(places.get(word, word) for word in arguments), "--out", str(out)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tra: error: ")]
    assert len(said) == 1 and sentence in said[0]
    assert not out.exists()
