"""The built-in corpus: the same files for a version of Python, splits that do not meet, a name with the version."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from traformer.data import Corpus, load_tokenizer, python_stdlib
from traformer.data.corpus import resolve
from traformer.errors import InputError

NAME = f"python-stdlib-{platform.python_version()}"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library with things beside it."""
    folder = tmp_path / "lib"
    for name, text in {
        "abc.py": "import a\n", "json/__init__.py": "load\n", "json/decoder.py": "decode\n", "json/tests/t.py": "no\n",
        "email/__init__.py": "", "email/header.py": "header\n", "site-packages/numpy.py": "no\n", "mine.py": "no\n",
        "test/test_abc.py": "no\n", "tkinter/__init__.py": "no\n", "json/notes.txt": "no\n", "turtle.py": "no\n",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_only_modules_of_the_library_are_taken(library: Path) -> None:
    found = [file.relative_to(library).as_posix() for file in python_stdlib.find_files(library)]
    assert found == ["abc.py", "email/header.py", "json/__init__.py", "json/decoder.py"]


def test_a_file_keeps_its_split() -> None:
    """By its path alone; these were drawn once and must never change."""
    assert [python_stdlib.split_of(f"module{n}.py") for n in range(40)].count("train") == 37
    assert python_stdlib.split_of("json/decoder.py") == "train"


def test_this_pythons_library() -> None:
    corpus = Corpus(["python-stdlib"])
    assert corpus.name == NAME and corpus.splits() == ["train", "validation", "test"] and not corpus.holds_out
    (train,), (validation,), (test,) = (corpus.sources[split] for split in corpus.splits())
    assert 5e6 < train.size < 3e7
    assert all(0.02 < part.size / train.size < 0.15 for part in (validation, test))
    files = [set(part.files) for part in (train, validation, test)]
    assert not files[0] & files[1] and not files[0] & files[2] and not files[1] & files[2]
    assert train.content_hash() == Corpus(["python-stdlib"]).sources["train"][0].content_hash()
    text = corpus.open("test", load_tokenizer("bytes"), quiet=True)
    assert len(text.documents) == len(test.files)
    first = test.files[0].read_text(encoding="utf-8")
    assert load_tokenizer("bytes").decode(text.tokens[: len(first.encode())].tolist()) == first


def test_every_file_can_be_read() -> None:
    for parts in Corpus(["python-stdlib"]).sources.values():
        assert list(parts[0].lines())[-1].done <= parts[0].size


def test_the_name_holds_the_version() -> None:
    assert resolve([]) == resolve(["python-stdlib"]) == resolve([NAME]) == (NAME,)
    with pytest.raises(InputError, match="of another Python than this one"):
        Corpus(["python-stdlib-2.7.1"])


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match="has no sources of its standard library"):
        Corpus()


def test_train_says_which_text_it_took_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the run's config names it; a text that was named needs no words."""
    from traformer.cli import main
    from traformer.training import loop

    configs = []

    def stub(config, out, **options):
        configs.append(config)
        return loop.TrainingResult(out, 0, None, 0.0)

    monkeypatch.setattr(loop, "train", stub)
    assert main(["train", "--task", "text", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert f"no data was named, so the text is {NAME}" in said and "data=FOLDER" in said
    assert configs[0].task_options["data"] == [NAME]
    for flags in (["--config", "text-small"], ["--task", "text", "--task-option", "data=python-stdlib"]):
        assert main(["train", *flags, "--out", str(tmp_path / "run")]) == 0
        assert "no data was named" not in capsys.readouterr().err
        assert configs[-1].task_options["data"] == [NAME]
