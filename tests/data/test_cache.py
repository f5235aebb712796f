"""The cache: right tokens and counts, complete or absent, built once by however many processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from traformer.data import Corpus, load_tokenizer
from traformer.data import cache as module
from traformer.data.cache import cached_folder, tokenize
from traformer.errors import InputError, RunError

TEXT = "".join(f"line {n} says hello to you\n" for n in range(2000))


def corpus(folder: Path, **files: str) -> Corpus:
    folder.mkdir(exist_ok=True)
    for name, text in (files or {"train": TEXT}).items():
        (folder / f"{name}.txt").write_text(text)
    return Corpus([str(folder)])


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob(".writing-*")]


def test_tokens_counts_and_documents(tmp_path: Path) -> None:
    text = corpus(tmp_path / "c", a="one two\nthree\n", b="vier\n").open("all", load_tokenizer("bytes"), quiet=True)
    assert bytes(text.tokens.astype(np.uint8)) == b"one two\nthree\nvier\n"
    assert text.dtype == "uint16" and isinstance(text.tokens, np.memmap)
    counts = text.counts
    assert (counts.tokens, counts.words, counts.line_ends, counts.bytes) == (19, 4, 3, 19)
    assert text.documents.tolist() == [0, 14]


def test_separator_marks_the_start_of_documents(tmp_path: Path) -> None:
    text = corpus(tmp_path / "c", a="ab\n", b="c\n").open("all", load_tokenizer("bytes"), separator=True, quiet=True)
    assert text.tokens.tolist() == [256, 97, 98, 10, 256, 99, 10]
    assert text.documents.tolist() == [0, 4] and text.counts.bytes == 5


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    class Wide(type(load_tokenizer("bytes"))):  # type: ignore[misc]
        vocab_size, fingerprint = 70_000, "wide"

        def encode_batch(self, texts):
            return [np.full(3, 69_999, dtype=np.uint32) for _ in texts]

    text = corpus(tmp_path / "c", a="x\n").open("all", Wide(), quiet=True)
    assert text.dtype == "uint32" and text.tokens.tolist() == [69_999] * 3


def test_the_tail_is_held_out_and_counted(tmp_path: Path) -> None:
    found = corpus(tmp_path / "c")
    assert found.splits() == ["train", "validation"] and "last 5 %" in found.describe("validation")
    train, held = (found.open(split, load_tokenizer("bytes"), quiet=True) for split in ("train", "validation"))
    whole = bytes(np.concatenate([train.tokens, held.tokens]).astype(np.uint8)).decode()
    assert whole == TEXT
    tail = bytes(held.tokens.astype(np.uint8)).decode()
    assert held.counts.words == len(tail.split()) and held.counts.line_ends == tail.count("\n")
    assert train.counts.tokens == len(train) and held.counts.bytes == len(tail)
    assert held.documents.tolist() == [0]


def test_a_text_too_short_to_hold_out_a_part(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too short to hold out"):
        corpus(tmp_path / "c", train="short\n").open("validation", load_tokenizer("bytes"), quiet=True)


def test_validation_files_are_not_trained_on(tmp_path: Path) -> None:
    found = corpus(tmp_path / "c", novel="abc\n", valid="xyz\n")
    assert bytes(found.open("train", load_tokenizer("bytes"), quiet=True).tokens.astype(np.uint8)) == b"abc\n"
    assert bytes(found.open("validation", load_tokenizer("bytes"), quiet=True).tokens.astype(np.uint8)) == b"xyz\n"
    with pytest.raises(InputError, match="no test split; it has: train, validation, all"):
        found.open("test", load_tokenizer("bytes"))


def test_made_once_and_made_anew_when_the_content_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = corpus(tmp_path / "c").open("train", load_tokenizer("bytes"), quiet=True)
    real = module._write_tokens
    monkeypatch.setattr(module, "_write_tokens", lambda *args: pytest.fail("made again"))
    assert corpus(tmp_path / "c").open("train", load_tokenizer("bytes"), quiet=True).folder == first.folder
    monkeypatch.setattr(module, "_write_tokens", real)
    other = corpus(tmp_path / "c", train=TEXT + "more\n").open("train", load_tokenizer("bytes"), quiet=True)
    assert other.folder != first.folder
    other = corpus(tmp_path / "c").open("train", load_tokenizer("bytes"), separator=True, quiet=True)
    assert other.folder != first.folder


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    found = corpus(tmp_path / "c")
    folder = found.open("all", load_tokenizer("bytes"), quiet=True).folder
    with open(folder / "tokens.bin", "r+b") as handle:
        handle.truncate(10)
    assert len(found.open("all", load_tokenizer("bytes"), quiet=True).tokens) == len(TEXT)


def test_a_full_disk_leaves_nothing_half(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = corpus(tmp_path / "c")
    real = module._write_batch

    def full(*args):
        real(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_write_batch", full)
    with pytest.raises(RunError, match=r"the disk is full.*nothing half was left.*TRAFORMER_CACHE"):
        found.open("all", load_tokenizer("bytes"), quiet=True)
    assert not leftovers(own_cache) and not [p for p in (own_cache / "tokens").iterdir() if p.is_dir()]
    monkeypatch.setattr(module, "_write_batch", real)
    assert len(found.open("all", load_tokenizer("bytes"), quiet=True)) == len(TEXT)


def test_a_real_limit_on_files_is_a_sentence(tmp_path: Path, own_cache: Path) -> None:
    """The system's own refusal, in a process that may write 4 KiB to a file: no traceback, nothing half."""
    corpus(tmp_path / "c")
    code = (
        "import resource, signal, sys\n"
        "from traformer.data import Corpus, load_tokenizer\n"
        "from traformer.errors import RunError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    Corpus([sys.argv[1]]).open('all', load_tokenizer('bytes'), quiet=True)\n"
        "except RunError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "limit on the size of a file" in done.stdout and "TRAFORMER_CACHE" in done.stdout
    assert not [path for path in own_cache.rglob("*") if path.name.startswith((".building-", ".writing-"))]


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "counts.bin", "meta.json"])
def test_a_cache_cut_short_behind_our_back_says_to_delete_it(tmp_path: Path, name: str) -> None:
    text = corpus(tmp_path / "c").open("all", load_tokenizer("bytes"), quiet=True)
    os.truncate(text.folder / name, 3)
    with pytest.raises(RunError, match=rf"token cache .* is damaged \({name} .*; delete that folder"):
        again = module.TokenizedText(text.folder)
        len(again.tokens), again.documents, again.counts


def test_a_cache_that_was_changed_says_to_delete_it(tmp_path: Path) -> None:
    text = corpus(tmp_path / "c").open("all", load_tokenizer("bytes"), quiet=True)
    counts = text.folder / "counts.bin"
    counts.write_bytes(b"\0" * counts.stat().st_size)
    with pytest.raises(RunError, match=r"is damaged \(counts\.bin .* changed"):
        _ = module.TokenizedText(text.folder).counts
    meta = json.loads((text.folder / "meta.json").read_text())
    for change in ({"sources": None}, {"dtype": []}, {"dtype": "float64"}, {"tokens": -1}):
        (text.folder / "meta.json").write_text(json.dumps({**meta, **change}))
        with pytest.raises(RunError, match=r"is damaged \(meta\.json"):
            module.TokenizedText(text.folder)


def test_a_trained_tokenizer_cut_short_is_made_again(tmp_path: Path, own_cache: Path) -> None:
    found = corpus(tmp_path / "c")
    before = load_tokenizer("bpe:270", found.training_text)
    (file,) = (own_cache / "tokenizers").glob("*/tokenizer.json")
    os.truncate(file, 10)
    assert load_tokenizer("bpe:270", found.training_text).fingerprint == before.fingerprint


@pytest.mark.parametrize("below", [False, True])
def test_a_cache_that_is_a_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: bool) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TRAFORMER_CACHE", str(tmp_path / "file" / "below" if below else tmp_path / "file"))
    with pytest.raises(RunError, match=r"file is a file.*TRAFORMER_CACHE"):
        corpus(tmp_path / "c").open("all", load_tokenizer("bytes"), quiet=True)


def test_a_bad_file_leaves_nothing_half(tmp_path: Path, own_cache: Path) -> None:
    found = corpus(tmp_path / "c")
    (tmp_path / "c" / "train.txt").write_bytes(TEXT.encode() + b"\xff\xfe\xfd")
    with pytest.raises(InputError, match="not UTF-8"):
        found.open("all", load_tokenizer("bytes"), quiet=True)
    assert not leftovers(own_cache)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, own_cache: Path) -> None:
    aside = own_cache / "tokens" / ".writing-k"
    aside.mkdir(parents=True)
    (aside / "half").write_text("x")
    made = cached_folder(own_cache / "tokens" / "k", lambda folder: (folder / "whole").write_text("y"), "thing")
    assert [file.name for file in made.iterdir()] == ["whole"]


def test_only_white_space_counts_as_text_but_nothing_at_all_does_not(tmp_path: Path) -> None:
    found = corpus(tmp_path / "c", a="x\n")
    start = "*** START OF THE PROJECT GUTENBERG EBOOK ***\n\n*** END OF THE PROJECT GUTENBERG EBOOK ***\n"
    (tmp_path / "c" / "a.txt").write_text(start)
    with pytest.raises(InputError, match="is empty"):
        found.open("all", load_tokenizer("bytes"), quiet=True)


def test_two_processes_at_once_build_it_once(tmp_path: Path, own_cache: Path) -> None:
    corpus(tmp_path / "c", train=TEXT * 20)
    code = (
        "import sys, time; from traformer.data import Corpus, load_tokenizer; from traformer.data import cache\n"
        "real = cache._write_tokens\n"
        "def slow(*args):\n    print('building', flush=True); time.sleep(1.5); real(*args)\n"
        "cache._write_tokens = slow\n"
        "text = Corpus([sys.argv[1]]).open('all', load_tokenizer('bytes'))\n"
        "print(len(text.tokens), int(text.tokens.sum()))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=120)[0].split("\n") for process in started]
    assert all(process.returncode == 0 for process in started)
    assert sorted(lines.count("building") for lines in printed) == [0, 1]
    assert printed[0][-2] == printed[1][-2]
    assert len([path for path in (own_cache / "tokens").iterdir() if path.is_dir()]) == 1


def test_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 4)  # batches of 64 KB
    peaks = []
    for times in (24, 72):
        sources = corpus(tmp_path / f"c{times}", train=TEXT * times).sources["train"]
        tracemalloc.start()
        tokenize(sources, load_tokenizer("bytes"), quiet=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] and peaks[1] < len(TEXT) * 72
