from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.training.tiny import tiny_config
from traformer.errors import RunError
from traformer.runs.folder import RunFolder


def started(path):
    folder = RunFolder(path)
    folder.write_config(tiny_config(), {"threads": 1})
    return folder


def test_config_is_written_with_versions(tmp_path):
    folder = started(tmp_path / "run")
    assert folder.read_config() == tiny_config()
    text = folder.config_file.read_text()
    assert "torch:" in text and "threads: 1" in text


def test_free_folders(tmp_path):
    assert RunFolder(tmp_path / "absent").is_free()
    assert RunFolder(tmp_path).is_free()
    (tmp_path / ".lock").write_text("process 1")  # what a start killed at once leaves
    (tmp_path / "config.yaml.1a2b3c4d.writing").write_text("task: fl")
    assert RunFolder(tmp_path).is_free()
    (tmp_path / "thesis.tex").write_text("precious")
    assert not RunFolder(tmp_path).is_free()


def test_only_runs_are_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder(tmp_path).clear()
    assert (tmp_path / "thesis.tex").exists()
    folder = started(tmp_path / "run")
    (folder.path / "checkpoints" / "step-1").mkdir(parents=True)
    folder.clear()
    assert folder.is_free()


def test_not_a_run(tmp_path):
    with pytest.raises(RunError, match="there is no run folder"):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(RunError, match=r"has no config\.yaml"):
        RunFolder.open(tmp_path)


def test_second_process_is_refused_and_a_killed_one_lets_go(tmp_path):
    code = (
        "import sys, time\n"
        "from traformer.runs.folder import RunFolder\n"
        f"with RunFolder({str(tmp_path)!r}).lock():\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=f"in use by process {holder.pid}"), RunFolder(tmp_path).lock():
            pass
        holder.kill()
    with RunFolder(tmp_path).lock():
        pass


def test_metrics_are_cut_back_and_a_torn_line_is_dropped(tmp_path):
    folder = started(tmp_path / "run")
    lines = [json.dumps({"step": step, "loss": 1.0 / 3.0}) for step in (10, 20, 30)]
    folder.metrics_file.write_text("\n".join(lines) + '\n{"step": 40, "lo')
    assert [row["step"] for row in folder.read_metrics()] == [10, 20, 30]
    folder.cut_metrics(20)
    assert folder.metrics_file.read_text() == "\n".join(lines[:2]) + "\n"
