"""Reading files: line ends, encodings, Gutenberg's licence, WikiText's articles, parquet, and pieces of all of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from traformer.data import pieces as pieces_module
from traformer.data.corpus import Corpus, split_of
from traformer.data.pieces import pieces
from traformer.data.sources import Line, TextFile, WikiTextFile, file_hash, rows_to_lines
from traformer.errors import InputError

GUTENBERG = (
    "﻿Header of the book\r\n\r\n***START OF THE PROJECT GUTENBERG EBOOK X***\r\n\r\n\r\nCall me.\r\n\r\nBye.\r\n\r\n"
)
LICENCE = "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\r\n*** START: FULL LICENSE ***\r\nlegal\r\n"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def text_of(source) -> str:
    return "".join(line.text for line in source.lines())


def test_gutenberg_frame_is_stripped(tmp_path: Path) -> None:
    assert text_of(TextFile(write(tmp_path / "a.txt", GUTENBERG + LICENCE))) == "Call me.\n\nBye.\n"


def test_other_text_is_left_as_it_is(tmp_path: Path) -> None:
    long = "line\n" * 1500 + "*** START OF THE PROJECT GUTENBERG EBOOK quoted late ***\nrest\n"
    assert text_of(TextFile(write(tmp_path / "a.txt", long))) == long
    assert text_of(TextFile(write(tmp_path / "b.txt", "a\r\nb\rc"))) == "a\nb\nc"


def test_shared_novels_lose_their_licence(shared: Path) -> None:
    for path in sorted((shared / "gutenberg").glob("*.txt")):
        text = text_of(TextFile(path))
        assert "GUTENBERG EBOOK" not in text.upper() and "FULL LICENSE" not in text.upper()
        assert len(text) > 0.95 * path.stat().st_size - 70_000


def test_articles_of_wikitext_and_its_word_count(shared: Path) -> None:
    path = shared / "wikitext-103" / "wiki.valid.tokens"
    lines = list(WikiTextFile(path).lines())
    assert "".join(line.text for line in lines) == path.read_text(encoding="utf-8")
    assert sum(line.starts_document for line in lines) == 60  # as published
    words = sum(len(line.text.split()) for line in lines)
    assert words + sum(line.text.count("\n") for line in lines) == 217_646  # as published


def test_titles_are_told_from_text_with_equal_signs() -> None:
    rows = ["", " = One = \n", "", " = = Part = = \n", " a b \n", " = Goals ; A = \n", "", " = Two = \n", " c \n"]
    starts = [line.text for line in rows_to_lines(iter(rows)) if line.starts_document]
    assert starts == [" \n", " = Two = \n"]


def test_rows_that_are_documents() -> None:
    lines = list(rows_to_lines(iter(["one\ntwo", "", "three"])))
    assert "".join(line.text for line in lines) == "one\ntwo\nthree\n"
    assert [line.text for line in lines if line.starts_document] == ["one\n", "three"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one", "two"]}), tmp_path / "a.parquet")
    (source,) = Corpus([str(tmp_path)]).sources["train"]
    assert text_of(source) == "one\ntwo\n"
    parquet.write_table(pyarrow.table({"x": ["a"], "y": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="must have a column 'text'"):
        Corpus([str(tmp_path)])
    write(tmp_path / "a.parquet", "not parquet")
    with pytest.raises(InputError, match="not a readable parquet"):
        Corpus([str(tmp_path)])


@pytest.mark.parametrize("content", ["caf\xe9 au lait".encode("latin1"), "text".encode("utf-16"), b"ab\0c"])
def test_wrong_encodings_are_told_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match="not UTF-8 text"):
        text_of(TextFile(write(tmp_path / "a.txt", content)))


def test_pieces_hold_the_same_text_and_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", 20)
    lines = [Line(f"word {n} of line\n" if n % 3 else "\n", n in (0, 40), n) for n in range(100)]
    found = list(pieces(lines))
    assert "".join(piece.text for piece in found) == "".join(line.text for line in lines)
    assert [piece.starts_document for piece in found].count(True) == 2
    assert len(found) > 20
    for piece, following in itertools.pairwise(found):
        if not following.starts_document:
            assert piece.text.endswith("line\n") and following.text.startswith("word")


def test_a_file_without_line_ends_is_cut_at_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE", 16)
    monkeypatch.setattr(pieces_module, "LONGEST_PIECE", 64)
    text = "abcdefg " * 200 + "x" * 500
    found = list(pieces(Line(text[start : start + 10], start == 0, start) for start in range(0, len(text), 10)))
    assert "".join(piece.text for piece in found) == text
    assert max(len(piece.text) for piece in found) <= 2 * 64 + 10
    assert found[1].text.startswith(" abcdefg") and sum(piece.starts_document for piece in found) == 1


def test_splits_by_file_name() -> None:
    names = {"wiki.train.part.tokens": "train", "wiki.valid.tokens": "validation", "dev.txt": "validation",
             "contest.txt": "train", "my_test.txt": "test", "validation-00000.parquet": "validation"}  # fmt: skip
    assert {name: split_of(Path(name)) for name in names} == names


def test_bad_places_are_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a file, nor a folder, nor one of wikitext-103"):
        Corpus([str(tmp_path / "absent")])
    with pytest.raises(InputError, match="data holds an empty name"):
        Corpus([" "])
    with pytest.raises(InputError, match="holds no text"):
        Corpus([str(tmp_path)])
    with pytest.raises(InputError, match="is empty"):
        Corpus([str(write(tmp_path / "a.txt", ""))])
    with pytest.raises(InputError, match="must end in"):
        Corpus([str(write(tmp_path / "a.pdf", "x"))])


def test_without_a_network_the_dataset_and_the_way_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("traformer.data.hub.reachable", lambda: False)

    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=r"wikitext-103 .*could not be loaded.*no network.*data=FOLDER"):
        Corpus(["wikitext-103"])


def test_a_dataset_of_the_hub_is_read_by_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["", " = One = \n", " a b \n"]})
    monkeypatch.setattr("traformer.data.hub.reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: {"train": rows, "validation": rows, "test": rows})
    corpus = Corpus(["wikitext-103"])
    assert corpus.splits() == ["train", "validation", "test"]
    assert text_of(corpus.sources["test"][0]) == " \n = One = \n a b \n"


def test_a_hash_follows_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one")
    first = file_hash(path)
    assert file_hash(path) == first == file_hash(write(tmp_path / "b.txt", "one"))
    assert file_hash(write(path, "three")) != first
