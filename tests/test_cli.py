from __future__ import annotations

import subprocess
import sys
import time

import pytest

from traformer.cli import COMMANDS, main


def run(*argv: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "traformer", *argv], capture_output=True, text=True, timeout=120, **more
    )


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from traformer.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    started = time.process_time(), time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started[1] < 5  # a tenth of a second on an idle machine; others may be busy here
    for command in COMMANDS:
        assert command in done.stdout


def test_every_command_has_help(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["bench", "atention"], "unknown benchmark 'atention'"),
        (["train", "--task", "flipflop"], "unknown task 'flipflop'; did you mean 'flip_flop'?"),
        (["train", "--attention", "roope"], "unknown attention 'roope'; did you mean 'rope'?"),
        (["train", "--preset", "hugest"], "unknown preset 'hugest'"),
        (["train", "--steps", "0"], "argument --steps"),
        (["train", "--steps", "many"], "argument --steps"),
        (["train", "--lr", "-1"], "lr is -1.0"),
        (["train", "--task-option", "length"], "not of the form name=value"),
        (["train", "--config", "absent.yaml"], "cannot read absent.yaml"),
        (["train", "--length", "7"], "length 7 is odd"),
        (["train", "--resume"], "--resume needs --out"),
        (["train", "--resume", "--out", "absent"], "there is no run folder absent"),
        (["train", "--resume", "--overwrite"], "not allowed with argument"),
        (["train", "--parallel", "ddp"], "needs several processes"),
        (["show", "flipflop"], "did you mean 'flip_flop'"),
        (["show", "copy", "--task-option", "alphabet=letter"], "did you mean 'letters'"),
        (["eval", "absent"], "there is no run folder absent"),
        (["report", "absent"], "there is no folder absent"),
        (["report", "."], "no measured run in ."),
        (["sweep", "dmeo"], "unknown experiment 'dmeo'; did you mean 'demo'?"),
        (["sweep", "absent.py"], "there is no experiment file absent.py"),
        (["sweep", "no.such.module"], "there is no module no.such.module"),
    ],
)
def test_bad_input_is_one_sentence_and_status_two(argv, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(argv)
    except SystemExit as stopped:  # argparse's own way out
        status = stopped.code
    shown = capsys.readouterr()
    assert status == 2
    assert words in shown.err
    assert shown.err.startswith("tra: error: ") and shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_no_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


def test_list_names_all_kinds(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in ("flip_flop", "induction", "tra", "rope", "mini", "demo"):
        assert name in text
    assert main(["list", "presets"]) == 0
    assert capsys.readouterr().out.split() == ["tiny", "mini", "small", "medium"]


def test_show_marks_answers(capsys):
    assert main(["show", "flip_flop", "--length", "12", "--examples", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].startswith("0: w ") and lines[1].rstrip().endswith("]")
    assert main(["show", "flip_flop", "--length", "12", "--start", "1", "--examples", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == lines[2]  # the same example however it is asked for


def test_train_eval_report_by_hand(tmp_path, capsys):
    out = str(tmp_path / "run")
    tiny = ["--preset", "tiny", "--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "4", "--threads", "1"]
    assert main(["train", "--task", "flip_flop", "--length", "12", "--steps", "3", *tiny, "--out", out]) == 0
    assert f"tra eval {out}" in capsys.readouterr().out
    assert main(["train", "--out", out]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", out, "--lr", "3"]) == 2
    assert "was started with lr" in capsys.readouterr().err
    # The same run from its own config file, one setting changed.
    assert main(["train", "--config", f"{out}/config.yaml", "--lr", "0.01", "--out", f"{out}2"]) == 0
    capsys.readouterr()
    assert main(["eval", out, "--lengths", "12", "24", "--examples", "5"]) == 0
    assert "sparse" in capsys.readouterr().out
    assert main(["report", out]) == 0
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "run" / "report.md").exists()


def test_a_closed_pipe_is_quiet():
    done = subprocess.run(
        f"{sys.executable} -m traformer show flip_flop --examples 4000 --length 64 | head -n 1",
        shell=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == "" and done.stdout.startswith("flip_flop")


def test_interrupt_is_a_sentence(monkeypatch, capsys):
    from traformer.commands import list_names

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(list_names, "main", interrupted)
    assert main(["list"]) == 130
    assert capsys.readouterr().err.startswith("tra: interrupted")


def test_version():
    done = run("--version")
    assert done.returncode == 0 and done.stdout.startswith("traformer ")
