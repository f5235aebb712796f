from __future__ import annotations

import json

import pytest

from traformer.errors import RunError
from traformer.runs import checkpoint as checkpoints
from traformer.storage import remove_leftovers


def write(folder, step, keep=10, text="weights"):
    return checkpoints.save(folder, step, lambda aside: (aside / "a.bin").write_text(f"{text} {step}") and None, keep)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_saved_checkpoint_is_whole_and_found(tmp_path):
    write(tmp_path, 5)
    write(tmp_path, 10)
    newest = checkpoints.latest_good(tmp_path)
    assert newest is not None and newest.step == 10 and newest.fault() is None
    assert (newest.path / "a.bin").read_text() == "weights 10"


def test_rotation_keeps_the_newest_by_number(tmp_path):
    for step in (2, 9, 10, 100):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-10", "step-100"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "a.bin").write_text("weights"), "a.bin has 7 bytes, not 10"),
        (lambda path: (path / "a.bin").write_text("weightz 10"), "a.bin differs from its sha256"),
        (lambda path: (path / "a.bin").unlink(), "a.bin is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text('{"files": {"a.bin"'), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is damaged"),
    ],
)
def test_damage_is_named_and_the_previous_one_is_used(tmp_path, damage, words):
    write(tmp_path, 9)
    damage(write(tmp_path, 10).path)
    heard = []
    good = checkpoints.latest_good(tmp_path, heard.append)
    assert good is not None and good.step == 9
    assert len(heard) == 1 and words in heard[0] and "step-10" in heard[0]


def test_nothing_good_is_none(tmp_path):
    assert checkpoints.latest_good(tmp_path / "absent") is None
    (write(tmp_path, 1).path / "a.bin").unlink()
    assert checkpoints.latest_good(tmp_path, lambda text: None) is None


def test_a_damaged_one_is_replaced_when_its_step_comes_again(tmp_path):
    (write(tmp_path, 10).path / "a.bin").write_text("")
    write(tmp_path, 10, text="again")
    assert names(tmp_path) == ["step-10"]
    good = checkpoints.latest_good(tmp_path)
    assert good is not None and (good.path / "a.bin").read_text() == "again 10"


def test_what_fails_while_writing_leaves_nothing_behind(tmp_path):
    write(tmp_path, 1)

    def breaks(aside):
        (aside / "a.bin").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"disk is full.*step 2.*step-1 is intact"):
        checkpoints.save(tmp_path, 2, breaks, keep=3)
    assert names(tmp_path) == ["step-1"]

    def safetensors_breaks(aside):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(RunError, match="disk is full"):
        checkpoints.save(tmp_path, 2, safetensors_breaks, keep=3)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(tmp_path, 2, lambda aside: 1 / 0, keep=3)
    assert names(tmp_path) == ["step-1"]


def test_leftovers_of_a_kill_are_not_checkpoints_and_are_removed(tmp_path):
    write(tmp_path, 4)
    (tmp_path / ".writing-step-8").mkdir()
    (tmp_path / ".writing-step-8" / "a.bin").write_text("half")
    (tmp_path / ".old-step-2").mkdir()
    assert [item.step for item in checkpoints.all_checkpoints(tmp_path)] == [4]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-4"]


def test_manifest_lists_every_file(tmp_path):
    manifest = json.loads((write(tmp_path, 3).path / "manifest.json").read_text())
    assert manifest["step"] == 3 and list(manifest["files"]) == ["a.bin"]
    assert manifest["files"]["a.bin"]["size"] == 9
