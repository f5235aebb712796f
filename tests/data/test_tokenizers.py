"""Tokenizers: bytes, GPT-2's files, BPE of a corpus; round trips, names, and what is said when one cannot be had."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from traformer.data import Corpus, load_tokenizer
from traformer.data.pieces import pieces
from traformer.data.tokenizers import check_same
from traformer.errors import InputError, RunError

ODD = "Ünïcode — “quotes”,  two blanks\n\n\ttabs 😀 123\n"


def test_bytes_are_utf8() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(ODD) == list(ODD.encode())
    assert tokenizer.decode(tokenizer.encode(ODD)) == ODD
    assert tokenizer.decode([104, 105, 256]) == "hi<|endoftext|>"
    with pytest.raises(InputError, match="ids 0 to 256"):
        tokenizer.decode([257])


def test_gpt2_from_its_files_under_either_name(shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "gpt2"))
    assert tokenizer.vocab_size == 50_257 and tokenizer.end_id == 50_256
    assert tokenizer.encode("Hello world") == [15496, 995]  # as GPT-2 is published
    assert tokenizer.decode(tokenizer.encode(ODD)) == ODD
    shutil.copy(shared / "gpt2" / "encoder.json", tmp_path / "vocab.json")
    shutil.copy(shared / "gpt2" / "vocab.bpe", tmp_path / "merges.txt")
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_tokens_do_not_depend_on_where_pieces_are_cut(shared: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "gpt2"))
    for place in ("gutenberg/middlemarch.txt", "wikitext-103/wiki.valid.tokens"):
        source = Corpus([str(shared / place)])
        parts = [piece.text for piece in itertools.islice(pieces(next(iter(source.sources.values()))[0].lines()), 12)]
        cut = [token for ids in tokenizer.encode_batch(parts) for token in ids.tolist()]
        assert cut == tokenizer.encode("".join(parts))


def corpus(folder: Path, text: str = "the cat sat on the mat; the dog sat on the log.\n" * 30) -> Corpus:
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_text(text)
    return Corpus([str(folder)])


def test_a_bpe_of_the_corpus_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = corpus(tmp_path / "corpus").training_text
    tokenizer = load_tokenizer("bpe:270", text)
    assert tokenizer.vocab_size == 270 and tokenizer.label == "bpe:270"
    assert tokenizer.decode(tokenizer.encode(ODD)) == ODD  # bytes it never saw
    assert len(tokenizer.encode("the cat sat")) < len("the cat sat")
    monkeypatch.setattr("traformer.data.tokenizers._texts", lambda sources: pytest.fail("trained again"))
    assert load_tokenizer("bpe:270", text).fingerprint == tokenizer.fingerprint


def test_a_saved_tokenizer_is_recognised_and_another_refused(tmp_path: Path) -> None:
    text = corpus(tmp_path / "corpus").training_text
    first, second = load_tokenizer("bpe:270", text), load_tokenizer("bpe:265", text)
    for number, tokenizer in enumerate((first, load_tokenizer("bytes"))):
        folder = tmp_path / f"saved{number}"
        folder.mkdir()
        tokenizer.save(folder)
        check_same(tokenizer, folder)
        with pytest.raises(RunError, match="not the one the run was trained with"):
            check_same(second, folder)


@pytest.mark.parametrize(
    "name,words",
    [("bpe:10", "too small"), ("bpe:x", "not of the form"), ("bpe:300", "no training text"), ("", "name or a folder")],
)
def test_names_that_cannot_be(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_tokenizer(name, [])


def test_a_corpus_too_small_for_its_bpe(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"too small for bpe:5000.*give bpe:\d+ or less"):
        load_tokenizer("bpe:5000", corpus(tmp_path / "corpus").training_text)


def test_a_folder_without_a_tokenizer_and_a_name_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setattr("traformer.data.hub.reachable", lambda: False)
    with pytest.raises(InputError, match=r"'no-such/tokenizer' is neither a folder nor could it be loaded.*no network"):
        load_tokenizer("no-such/tokenizer")
