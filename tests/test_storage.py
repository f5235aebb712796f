from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from traformer.errors import RunError
from traformer.storage import (
    Locked,
    check_file,
    check_folder,
    full_reason,
    lock,
    make_folder,
    remove_folder,
    remove_leftovers,
    write_atomically,
    write_folder,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_replaced_or_left_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    write_atomically(file, "one")
    write_atomically(file, "zwei ü")
    assert file.read_text(encoding="utf-8") == "zwei ü" and names(tmp_path) == ["a.txt"]

    def fails(source: object, target: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(RunError, match=r"a\.txt could not be written: Read-only file system"):
        write_atomically(file, "three")
    assert file.read_text(encoding="utf-8") == "zwei ü" and names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"),
        (OSError(errno.EDQUOT, "x"), "quota"),
        (OSError(errno.EFBIG, "x"), "ulimit -f"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("File too large (os error 27)"), "ulimit -f"),
        (OSError(errno.EACCES, "x"), None),
        (RuntimeError("os error 13"), None),
        (ValueError("nothing"), None),
    ],
)
def test_why_nothing_more_can_be_written(error, reason):
    found = full_reason(error)
    assert found is None if reason is None else reason in (found or "")


def test_a_folder_is_whole_or_absent(tmp_path):
    target = tmp_path / "made"
    write_folder(target, lambda folder: (folder / "a").write_text("1") and None)
    write_folder(target, lambda folder: (folder / "b").write_text("2") and None)
    assert names(tmp_path) == ["made"] and names(target) == ["b"]

    def breaks(folder: Path) -> None:
        (folder / "c").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(target, breaks)
    assert names(tmp_path) == ["made"] and names(target) == ["b"]
    (tmp_path / ".writing-made").mkdir()
    (tmp_path / ".old-made").mkdir()
    remove_leftovers(tmp_path)
    remove_folder(target)
    assert names(tmp_path) == []


def test_what_can_be_a_file(tmp_path):
    check_file(tmp_path / "new.json")
    (tmp_path / "old.json").write_text("")
    check_file(tmp_path / "old.json")
    with pytest.raises(RunError, match="is a folder; give the name of a file"):
        check_file(tmp_path)
    with pytest.raises(RunError, match=r"the folder .*absent does not exist; make it first"):
        check_file(tmp_path / "absent" / "new.json")
    with pytest.raises(RunError, match="does not exist"):
        check_file(tmp_path / "old.json" / "new.json")


def test_what_can_be_a_folder(tmp_path):
    assert make_folder(tmp_path / "a" / "b").is_dir()
    make_folder(tmp_path / "a" / "b")
    check_folder(tmp_path / "not" / "there")
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (("file", "is a file"), ("file/x", "is a file"), ("loop/x", "link"), ("x" * 300, "too long")):
        with pytest.raises(RunError, match=words):
            make_folder(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunError, match="may not be written to"):
            check_folder(tmp_path / "x")
    finally:
        tmp_path.chmod(0o700)


def _take(path: Path, waited: bool, results: multiprocessing.Queue) -> None:
    try:
        with lock(path, (lambda: results.put("waits")) if waited else None):
            results.put("held")
    except Locked as held:
        results.put(held.holder)


@pytest.mark.parametrize("waits", [False, True])
def test_a_lock_is_held_by_one_process(tmp_path, waits):
    context = multiprocessing.get_context("spawn")  # a fork would inherit the open lock file
    results: multiprocessing.Queue = context.Queue()
    with lock(tmp_path / "l"):
        other = context.Process(target=_take, args=(tmp_path / "l", waits, results))
        other.start()
        assert results.get(timeout=60) == ("waits" if waits else f"process {os.getpid()} on {os.uname().nodename}")
    if waits:
        assert results.get(timeout=60) == "held"
    other.join()
