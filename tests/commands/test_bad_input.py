"""What a careless or unlucky user meets: one sentence, status 2, nothing lost. Runs in this process where it can."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands.conftest import refused
from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.errors import InputError, RunError
from traformer.runs.folder import RunFolder

TINY = ["train", "--length", "12", "--steps", "2", "--preset", "tiny", "--layers", "1", "--width", "16", "--heads", "2"]


# Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--clip", "0"], "clip is 0.0; it must be above 0, or left out for no clipping"),
        (["--lr", "0"], "lr is 0.0; it must be above 0"),
        (["--lr", "nan"], "lr is nan; it must be a finite number"),
        (["--beta1", "1"], "beta1 is 1.0; it must be at least 0 and below 1"),
        (["--task-option", "length=abc"], "--length and --task-option length set the same"),
        (["--model-option", "num_hidden_layers=3"], "--layers and --model-option num_hidden_layers set the same"),
        (["--task-option", "p_ignore=0.5", "--task-option", "p_ignore=0.6"], "p_ignore is given twice"),
        (["--threads", "1000000"], "threads is 1000000; give 1 to"),
        (["--device", "meta"], "device 'meta' cannot compute here"),
        (["--device", "mps"], "device 'mps' cannot compute here"),
        (["--task-option", "p_ignore=true"], "p_ignore must be a probability from 0 to 1, not True"),
        (["--model-option", "rms_norm_eps=nan"], "rms_norm_eps must be a finite number above 0, not nan"),
        (["--model-option", "embedding_range=-1"], "embedding_range must be a finite number above 0, not -1"),
        (["--attention", "TRA"], "unknown attention 'TRA'; did you mean 'tra'?"),
        (["--attention", "quux"], "unknown attention 'quux'. Known: tra, rope"),
    ],
)
def test_settings_that_are_refused(flags, words, tra, tmp_path):
    refused(tra(*TINY, *flags, "--out", tmp_path / "run"), words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["generate", "tra", "--prompt", "w 1", "--temperature", "inf"],
            "temperature must be >= 0 and finite, not inf",
        ),
        (["generate", "tra", "--prompt", "w 1", "--temperature", "1", "--seed", "9" * 30], "is out of range"),
        (["generate", "tra", "--prompt", "w 1", "--temperature", "1", "--seed", "-1"], "seed -1 is out of range"),
        (["generate", "text", "--prompt", "a\udcff"], "bytes that are not UTF-8"),
        (["explore", "text", "--prompt", "a\udcff"], "bytes that are not UTF-8"),
        (["explore", "tra", "--out", "absent/page.html"], "the folder absent does not exist; make it first"),
        (["explore", "tra", "--out", "tra"], "tra is a folder; give the name of a file"),
        (["list", "tasks", "--options", "tra"], "leave out 'tasks'"),
        (["sweep", "."], "unknown experiment '.'"),
        (["reproduce", "copy", "--scale", "smoke", "--seeds", "100000000"], "is more than 1000"),
        (["bench", "attention", "--seconds", "nan"], "'nan' is not a finite number"),
        (["bench", "attention", "--seconds", "0"], "'0' is not a number above zero"),
        (["bench", "attention", "--markdown", "tra"], "tra is a folder; give the name of a file"),
        (["bench", "decode", "--json", "absent/rows.json"], "the folder absent does not exist; make it first"),
        (["bench", "train", "--gate-bias", "inf"], "'inf' is not a finite number"),
        (["bench", "train", "--threads", "1000000"], "threads is 1000000"),
        (["bench", "tasks", "--json", "tra"], "tra is a folder; give the name of a file"),
    ],
)
def test_arguments_that_are_refused(argv, words, runs, tra):
    refused(tra(*argv), words)


def test_length_is_given_once_to_show_too(tra):
    refused(tra("show", "flip_flop", "--length", "12", "--task-option", "length=14"), "set the same")


@pytest.mark.parametrize("argv", [["eval", "tra"], ["stretch", "tra", "--lengths", "16"], ["diagnose", "tra"],
                                  ["generate", "tra", "--prompt", "w 1"]])  # fmt: skip
def test_threads_beyond_reason(argv, runs, tra):
    refused(tra(*argv, "--threads", "1000000"), "threads is 1000000")


# Places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("file/run", "file is a file"),
        ("file", "file is a file"),
        ("dangling", "is a link to nowhere, which does not exist"),
        ("dangling/run", "is a link to nowhere, which does not exist"),
        ("a" * 300, "name too long"),
    ],
)
def test_out_that_cannot_be_a_folder(out, words, runs, tra):
    Path("file").write_text("precious")
    Path("dangling").symlink_to("nowhere")
    refused(tra(*TINY, "--out", out), words, "choose another --out")
    assert tra("eval", "tra", "--lengths", "12", "--examples", "2").status == 0
    refused(tra("report", "tra", "--out", out), words)
    refused(tra("stretch", "tra", "--lengths", "12", "--out", out), words)
    refused(tra("diagnose", "tra", "--lengths", "12", "--out", out), words)
    refused(tra("sweep", "demo", "--out", out), words)
    refused(tra("demo", "--out", out), words)
    assert Path("file").read_text() == "precious" and not Path("nowhere").exists()


def test_cache_that_is_a_file(tra, tmp_path, corpus, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAFORMER_CACHE", str(tmp_path / "file"))
    refused(tra("data", corpus), "file is a file", "name another place in TRAFORMER_CACHE")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file, as `ulimit -f` makes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_size_limit_is_a_sentence(tra, tmp_path):
    with file_size_limit(4096):
        done = tra(*TINY, "--threads", "1", "--out", tmp_path / "run")
    assert done.status == 2
    last = done.err.splitlines()[-1]
    assert "the limit on the size of a file (ulimit -f) is reached" in last and "no earlier checkpoint" in last


def test_cache_on_a_full_disk_is_a_sentence(tra, tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("TRAFORMER_CACHE", str(tmp_path))
    with file_size_limit(4096):
        done = tra("data", corpus)
    refused(done, "is reached, so the tokens of", "nothing half was left")
    assert not list(tmp_path.rglob(".writing-*"))


def test_ulimit_on_memory_counts(monkeypatch):
    from traformer.models import memory

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 40, 1 << 40))
    monkeypatch.setattr(memory.psutil.Process, "memory_info", lambda self: type("Info", (), {"vms": (1 << 40) - 77})())
    assert memory.available_memory() == 77


def test_what_is_kept_free_is_said_where_it_decides():
    from traformer.models.memory import check_fits

    with pytest.raises(InputError, match=r"needs about 95.0 GiB .* 100.0 GiB are free \(10% of that is kept free\)"):
        check_fits(95 << 30, 100 << 30, "it", "leave it")
    with pytest.raises(InputError, match=r"100.0 GiB are free, so it is not tried; leave it"):
        check_fits(101 << 30, 100 << 30, "it", "leave it")


def test_diagnose_checks_memory_first(runs, tra):
    refused(tra("diagnose", "tra", "--lengths", "1m", "--examples", "1"), "diagnosing a sequence of 1048576 tokens")


# Files that others have touched ---------------------------------------------------------------------------------


def test_checkpoint_of_another_run_is_refused(runs, tra):
    shutil.rmtree(runs / "tra" / "checkpoints")
    shutil.copytree(runs / "rope" / "checkpoints", runs / "tra" / "checkpoints")
    words = ("has attention = 'rope'", "config.yaml says 'tra'", "another run")
    refused(tra("eval", "tra", "--lengths", "12"), *words)
    refused(tra("generate", "tra", "--prompt", "w 1"), *words)
    done = tra("train", "--resume", "--out", "tra")
    assert done.status == 2 and all(word in done.err for word in words)


def test_damaged_checkpoint_is_a_line_not_a_python_warning(runs, tra, recwarn):
    (runs / "tra" / "checkpoints" / "step-2" / "model.safetensors").write_bytes(b"")
    for argv in (["generate", "tra", "--prompt", "w 1", "--max-new-tokens", "1"], ["eval", "tra", "--lengths", "12"]):
        done = tra(*argv)
        assert done.status == 0
        assert "step-2 is damaged" in done.err and "UserWarning" not in done.err
    assert not [warning for warning in recwarn if "damaged" in str(warning.message)]


GARBAGE = [b"\xff\xfe\x00garbage\n", b"[1, 2]\n", b'{"step": "two"}\n', b'{"loss": 1.0}\n', b"null\n", b"\n"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_the_log_blocks_nothing(garbage, runs, tra):
    log = runs / "tra" / "metrics.jsonl"
    log.write_bytes(garbage + log.read_bytes())
    assert [row["step"] for row in RunFolder("tra").read_metrics()] == [1, 2]
    assert tra("eval", "tra", "--lengths", "12", "--examples", "2").status == 0
    assert tra("report", "tra").status == 0
    shutil.rmtree(runs / "tra" / "checkpoints" / "step-2")
    done = tra("train", "--resume", "--out", "tra")
    assert done.status == 0
    assert "1 damaged lines" in done.err and (runs / "tra" / "metrics.damaged.jsonl").read_bytes().startswith(garbage)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("text", ['[{"a": 1}]', "[1]", '{"a": 1}', "[[]]", "nonsense"])
def test_results_of_another_shape(text, runs, tra):
    (runs / "tra" / "results.json").write_text(text)
    for argv in (["report", "tra"], ["eval", "tra", "--lengths", "12"]):
        refused(tra(*argv), "results.json", "delete it")


def test_a_damaged_cached_tokenizer_is_made_again(tmp_path, corpus, monkeypatch, tra):
    monkeypatch.setenv("TRAFORMER_CACHE", str(tmp_path))
    assert tra("data", corpus, "--tokenizer", "bpe:260").status == 0
    (file,) = (tmp_path / "tokenizers").rglob("tokenizer.json")
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    (tokens,) = (tmp_path / "tokens").rglob("tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:10])
    assert tra("data", corpus, "--tokenizer", "bpe:260").status == 0
    assert file.read_bytes() == whole


# Text runs from another folder ----------------------------------------------------------------------------------


def test_a_text_run_is_used_from_any_folder(tmp_path, monkeypatch, tra, corpus):
    shutil.copytree(corpus, tmp_path / "here" / "words")
    monkeypatch.chdir(tmp_path / "here")
    options = ["--task", "text", "--task-option", "data=words"]
    done = tra(*TINY, *options, "--threads", "1", "--out", "../run")
    assert done.status == 0, done.err
    stored = RunFolder(tmp_path / "run").read_config().task_options
    assert stored["data"] == [str(tmp_path / "here" / "words")]
    assert tra("train", "--resume", "--out", "../run", *options).status == 0  # the same data, named as before
    monkeypatch.chdir(tmp_path)
    assert tra("eval", "run", "--lengths", "16", "--examples", "1").status == 0


def test_missing_data_says_where_it_was_looked_for(tra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(tra("data", "words"), f"looked for in {tmp_path}")


# Output ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_printed_only_when_it_is_good(runs, tra):
    done = tra("generate", "tra", "--prompt", "w 9")
    refused(done, "unknown flip_flop token '9'")
    assert done.out == ""


@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&-", "> /dev/full", "2> /dev/full", "2>&-"])
def test_streams_that_are_closed_or_full(redirect, tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m traformer list tasks {redirect}", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if redirect == "> /dev/full":
        assert done.returncode == 2
        assert done.stderr == "tra: error: the output could not be written: No space left on device\n"
    else:
        assert (done.returncode, done.stderr) == (0, "")


def test_training_goes_on_when_nobody_reads(tmp_path, monkeypatch):
    class Gone(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Gone(io.BytesIO(), encoding="utf-8"))
    assert main([*TINY, "--threads", "1", "--log-every", "1", "--out", str(tmp_path / "run")]) == 141
    assert [row["step"] for row in RunFolder(tmp_path / "run").read_metrics()] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json").exists()


def test_ascii_output(runs, monkeypatch):
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert main(["eval", "tra", "--lengths", "12", "--examples", "2"]) == 0
    assert main(["report", "tra"]) == 0
    shown = streams["stdout"].buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "exact match" in shown and "report.html" in shown


def test_a_missing_kernel_is_one_line_at_the_start(tmp_path, tra, monkeypatch):
    from traformer.ops.threshold_relative import cpu

    for variable in (cpu.ISA_VARIABLE, cpu.LIBRARY_VARIABLE):  # with one of these set, a missing kernel is an error
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "the kernel was not built")
    cpu.note_missing_kernel.cache_clear()
    try:
        done = tra(*TINY, "--threads", "1", "--log-every", "1", "--out", tmp_path / "run")
    finally:
        cpu.note_missing_kernel.cache_clear()
    assert done.status == 0
    lines = done.err.splitlines()
    assert [line for line in lines if "not built" in line] == [lines[0]]
    assert lines[0].startswith("tra: warning: the kernel was not built; attention runs on the slower backend")


def test_a_locked_run_names_its_holder(runs, tra):
    with RunFolder("tra").lock():
        refused(tra("train", "--resume", "--out", "tra"), f"in use by process {os.getpid()}")


def test_write_errors_keep_the_old_file(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    folder.write_config(tiny_config(), {})
    before = folder.config_file.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"config\.yaml could not be written: the disk is full"):
        folder.write_config(tiny_config(seed=3), {})
    assert folder.config_file.read_bytes() == before and not list(folder.path.glob("*.writing"))
