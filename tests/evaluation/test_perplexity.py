"""Perplexity by window against the plain formula, its normalisers, its windows, and `tra eval` of a text run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from traformer.cli import main
from traformer.evaluation.perplexity import RECURRING, Measured, measure_perplexity, recurrence_distances, windows
from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.models import loss as loss_module
from traformer.tasks import Text

NAMES = ["alpha", "beta", "gamma", "delta"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAFORMER_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "corpus"
    place.mkdir()
    words = [NAMES[(n * n + n // 3) % 4] for n in range(900)]
    (place / "train.txt").write_text(" ".join(words[:700]) + "\n")
    (place / "valid.txt").write_text(" ".join(words[700:]) + "\n")
    return place


@pytest.fixture
def model() -> TraformerForCausalLM:
    torch.manual_seed(0)
    config = TraformerConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=None
    )
    return TraformerForCausalLM(config).double().eval()


@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 50])
@pytest.mark.parametrize("window,stride", [(8, 7), (8, 1), (8, 3), (2, 1), (64, 63)])
def test_every_token_but_the_first_is_scored_once_with_its_context(tokens: int, window: int, stride: int) -> None:
    scored = []
    for number, one in enumerate(windows(tokens, window, stride)):
        assert 0 <= one.start < one.first < one.stop <= tokens and one.stop - one.start <= window
        if number:
            assert one.first - one.start >= min(window - stride, one.first)
        scored += range(one.first, one.stop)
    assert scored == list(range(1, tokens))


@pytest.mark.parametrize(
    "window,stride,batch", [(16, None, 1), (16, None, 7), (16, 5, 4), (300, None, 1), (2, None, 64)]
)
def test_equals_the_plain_formula(folder, model, monkeypatch, window, stride, batch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 1000)
    text = Text(data=str(folder)).open("validation")
    measured = measure_perplexity(model, text, window, stride, tokens=300, batch_size=batch)
    total, by_place = 0.0, [[] for _ in range(window)]
    ids = torch.from_numpy(text.tokens[:300].astype("int64"))
    with torch.no_grad():
        for one in windows(300, window, stride or window - 1):
            part = ids[one.start : one.stop][None]
            losses = F.cross_entropy(model(part).logits[0, :-1], part[0, 1:], reduction="none")
            for place in range(one.first - one.start, part.shape[1]):
                total += losses[place - 1].item()
                by_place[place].append(losses[place - 1].item())
    assert measured.scored == 299
    assert measured.loss == pytest.approx(total / 299, rel=1e-9)
    for first, last, value, _ in measured.by_position():
        found = [loss for place in range(int(first), int(last) + 1) for loss in by_place[place]]
        assert value == pytest.approx(sum(found) / len(found), rel=1e-9)


@pytest.mark.parametrize("length", [0, 1, RECURRING, RECURRING + 1, 9, 400])
@pytest.mark.parametrize("vocabulary", [1, 2, 3])
def test_recurrence_is_how_long_ago_the_same_tokens_came_before(length: int, vocabulary: int) -> None:
    tokens = np.random.default_rng(length).integers(7, 7 + vocabulary, length)
    runs = {place: tuple(tokens[place - RECURRING : place]) for place in range(RECURRING, length)}
    expected = [
        next((d for d in range(1, place) if place - d in runs and runs[place - d] == runs[place]), 0)
        for place in range(length)
    ]
    assert recurrence_distances(tokens.astype(np.uint16)).tolist() == expected


def test_loss_by_recurrence_is_a_mean_over_the_tokens_at_that_distance() -> None:
    distances = np.array([0, 0, 1, 2, 3, 4, 900])
    measured = Measured(8, len(distances), distances)
    losses = np.arange(7, dtype=float)
    for part in (slice(1, 4), slice(4, 7)):
        places = np.arange(7)[part]
        measured.add(losses[part], places, places)
    assert measured.by_recurrence() == [(1, 1, 2.0, 1), (2, 3, 3.5, 2), (4, 7, 5.0, 1), (512, 1023, 6.0, 1)]


@pytest.mark.parametrize("window,stride", [(64, None), (16, 5), (16, None)])
def test_a_frame_sorts_the_same_tokens_whatever_window_is_read(folder, model, window: int, stride: int | None) -> None:
    text = Text(data=str(folder)).open("validation")
    frame, tokens = 64, 300
    measured = measure_perplexity(model, text, window, stride, tokens, batch_size=3, frame=frame)
    distances = recurrence_distances(text.tokens[:tokens])
    place = {
        token: token - one.start for one in windows(tokens, frame, frame - 1) for token in range(one.first, one.stop)
    }
    held = [d for t, d in enumerate(distances) if t and d and d + RECURRING <= place[t]]
    assert 0 < len(held) < (distances > 0).sum()
    for first, last, _, count in measured.by_position():
        assert count == sum(first <= at <= last for at in place.values())
    for first, last, _, count in measured.by_recurrence():
        assert count == sum(first <= d <= last for d in held)
    plain = measure_perplexity(model, text, window, stride, tokens)
    assert measured.loss == plain.loss and len(measured.position_loss) == frame
    if window == frame:
        assert measured.by_position() == plain.by_position()


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity(folder, model) -> None:
    with torch.no_grad():
        model.lm_head.weight.zero_()
    measured = measure_perplexity(model, Text(data=str(folder)).open("validation"), 32, batch_size=8)
    assert math.exp(measured.loss) == pytest.approx(257)
    low, high = measured.interval()
    assert low == pytest.approx(high) == pytest.approx(measured.loss)


def test_the_interval_covers_the_mean_of_noise() -> None:
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        measured = Measured(2, 1024 * 40, np.zeros(1024 * 40, dtype=np.int64))
        measured.block_count += 1024
        measured.block_loss += (2.0 + torch.randn(40, generator=generator).numpy() * 0.1) * 1024
        low, high = measured.interval()
        inside += low < 2.0 < high
    assert 175 <= inside <= 200


def train(folder: Path, out: Path, *more: str) -> None:
    assert main(
        ["train", "--task", "text", "--task-option", f"data={folder}", "--length", "32", "--layers", "1",
         "--width", "32", "--heads", "2", "--steps", "3", "--batch-size", "4", "--threads", "1",
         "--out", str(out), *more]
    ) == 0  # fmt: skip


def test_tra_eval_of_a_text_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(folder, run)
    assert main(["eval", str(run), "--lengths", "32,64", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    for words in ("split validation", "tokenizer bytes", "BOS none", "windows run across", "200 words + 1 line ends",
                  "loss in nats by place"):  # fmt: skip
        assert words in out
    rows = json.loads((run / "results.json").read_text())
    assert {row["length"] for row in rows} == {32, 64}
    value = {(row["length"], row["metric"]): row["value"] for row in rows}
    held_out = (folder / "valid.txt").read_text()
    loss = math.log(value[64, "perplexity"])
    assert value[64, "bits_per_byte"] == pytest.approx(loss / math.log(2))
    assert value[64, "word_perplexity"] == pytest.approx(math.exp(loss * len(held_out) / (200 + 1)))
    by_place = [row for row in rows if row["metric"] == "loss_by_place"]
    for length in (32, 64):
        assert sum(row["counted"] for row in by_place if row["length"] == length) == len(held_out) - 1
    by_distance = [row for row in rows if row["metric"] == "loss_by_recurrence"]
    recurring = int((recurrence_distances(np.frombuffer(held_out.encode(), dtype=np.uint8)) > 0).sum())
    for length in (32, 64):
        assert sum(row["counted"] for row in by_distance if row["length"] == length) == recurring > 0
    for row in rows:
        assert row["protocol"]["stride"] == row["length"] - 1
        if row not in by_place and row not in by_distance:
            assert row["low"] <= row["value"] <= row["high"] and row["counted"] == len(held_out) - 1

    # Measured again only when asked; a stride is another measurement beside it.
    assert main(["eval", str(run), "--lengths", "32,64", "--stride", "8", "--threads", "1"]) == 0
    assert {row["split"] for row in json.loads((run / "results.json").read_text())} == {
        "validation",
        "validation stride 8",
    }
    (folder / "more.txt").write_text("delta alpha\n" * 40)
    assert main(["eval", str(run), "--lengths", "32", "--data", str(folder / "more.txt"), "--threads", "1"]) == 0
    assert "split all" in capsys.readouterr().out
    assert main(["report", str(run), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "Text validation: bits per byte" in page and "protocol: " in page and "<h1>Perplexity by window</h1>" in page
    assert "Text validation: loss by place in the window" in page
    assert "Text, trained to 32: bits per byte" in capsys.readouterr().out
    markdown = (tmp_path / "page" / "report.md").read_text()
    commands = [line for line in markdown.splitlines() if line.startswith("tra eval")]
    assert [line.partition("--examples 256")[2] for line in commands] == [
        "", " --stride 8", f" --data {folder / 'more.txt'}",
    ]  # fmt: skip


def test_a_tokenizer_trained_for_a_run_is_evaluated_without_its_corpus(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(folder, run, "--task-option", "tokenizer=bpe:260")
    (folder / "train.txt").write_text("other words than the tokenizer was trained on\n" * 50)
    assert main(["eval", str(run), "--lengths", "32", "--threads", "1"]) == 0
    rows = json.loads((run / "results.json").read_text())
    assert rows[0]["protocol"]["tokenizer"] == "bpe:260" and rows[0]["protocol"]["vocabulary"] == 260


def test_another_text_is_measured_again_once_it_has_changed(folder: Path, tmp_path: Path) -> None:
    """With the same number of tokens, words and bytes, too."""
    run, other = tmp_path / "run", tmp_path / "other.txt"
    train(folder, run)

    def perplexity() -> float:
        assert main(["eval", str(run), "--lengths", "32", "--data", str(other), "--threads", "1"]) == 0
        (found,) = [row for row in json.loads((run / "results.json").read_text()) if row["metric"] == "perplexity"]
        return found["value"]

    other.write_text("delta alpha\n" * 40)
    first = perplexity()
    written = (run / "results.json").stat().st_mtime_ns
    assert perplexity() == first and (run / "results.json").stat().st_mtime_ns == written
    other.write_text("alpha qqqqq\n" * 40)
    assert perplexity() != first


def test_bad_input_of_eval(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(folder, run)
    for arguments, words in [
        (["--lengths", "99999"], "window of 99,999 tokens is longer than the text"),
        (["--lengths", "32", "--stride", "32"], "stride 32 must be between 1 and 31"),
        (["--split", "test"], "has no test split"),
        (["--seed", "3"], "do not apply to text"),
        (["--data", str(tmp_path / "absent.txt")], "neither a file, nor a folder"),
    ]:
        capsys.readouterr()
        assert main(["eval", str(run), *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("length: 32", "length: 32\n  tokenizer: bpe:260")
    )
    assert main(["eval", str(run)]) == 2
    assert "not the one the run was trained with" in capsys.readouterr().err


def test_a_run_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "whole", "--save-every", "1")
    train(folder, tmp_path / "part", "--save-every", "1")
    import shutil

    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-3")
    assert main(["train", "--resume", "--out", str(tmp_path / "part")]) == 0
    name = "checkpoints/step-3/model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "part" / name).read_bytes()
