from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types

import pytest

from traformer.cli import COMMANDS, main
from traformer.experiments import EXPERIMENTS
from traformer.methods import METHODS
from traformer.models.from_run import build_model_config
from traformer.runs.config import RunConfig, flag_of, setting_of
from traformer.sweeps.cell import Cell
from traformer.tasks import TASKS, build_task


def run(*argv: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "traformer", *argv], capture_output=True, text=True, timeout=120, **more
    )


def loaded_by(*argv: str) -> tuple[set[str], str]:
    """The packages that a command loads, and what it prints."""
    code = (
        "import sys\n"
        "from traformer.cli import main\n"
        f"try: main({list(argv)!r})\n"
        "except SystemExit: pass\n"
        "print('loaded', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, _, packages = done.stdout.rpartition("loaded ")
    return set(packages.split()), shown + done.stderr


def test_help_loads_nothing_heavy():
    packages, shown = loaded_by("--help")
    assert not packages & {"torch", "transformers", "numpy", "matplotlib", "rich", "yaml"}
    for command in COMMANDS:
        assert command in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["list"], "tra_plus"),
        (["list", "--options", "tra_plus"], "straight_through"),
        (["train", "--attention", "roope"], "did you mean 'rope'?"),
        (["train", "--attention-option", "treshold=1"], "unknown to attention 'tra'; its options: threshold"),
        (["train", "--task", "copi"], "did you mean 'copy'?"),
        (["train", "--task-option", "lenght=8"], "did you mean 'length'?"),
        (["train", "--preset", "tny"], "did you mean 'tiny'?"),
        (["eval", "absent"], "there is no run folder absent"),
        (["stretch", "absent", "--lengths", "8"], "there is no run folder absent"),
        (["diagnose", "absent"], "there is no run folder absent"),
        (["generate", "absent", "--prompt", "x"], "there is no run folder absent"),
        (["sweep", "dmeo"], "did you mean 'demo'?"),
    ],
)
def test_names_are_listed_and_refused_without_torch(argv, words, tmp_path):
    packages, shown = loaded_by(*argv)
    assert words in shown
    assert not packages & {"torch", "transformers", "matplotlib"}


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
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["tasks", "attentions", "presets", "experiments"] and "rope" in found["attentions"]


@pytest.mark.parametrize("name", [*TASKS, *METHODS, "model"])
def test_every_option_is_listed_and_taken(name, capsys):
    """`tra list --options` shows exactly what the task, the attention or the model takes."""
    assert main(["list", "--options", name, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in shown["options"]]
    if name in TASKS:
        assert names == TASKS[name].setting_names() and shown["flag"] == "--task-option"
    elif name in METHODS:
        assert names == list(METHODS[name].option_table) and all(row["help"] for row in shown["options"])
    else:
        task = build_task("flip_flop")
        for option in ("hidden_size", "qk_norm", "residual"):
            assert option in names
        for row in shown["options"]:
            build_model_config(RunConfig(model_options={row["name"]: row["default"]}), task)
    assert main(["list", "--options", name]) == 0
    assert all(option in capsys.readouterr().out for option in names[:1])


def test_options_of_an_unknown_name(capsys):
    assert main(["list", "--options", "flipflop"]) == 2
    assert "did you mean 'flip_flop'" in capsys.readouterr().err


def test_flags_of_train_are_the_settings_of_a_run(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for item in dataclasses.fields(RunConfig):
        assert flag_of(item) in shown
        words = setting_of(item).help.split()
        assert all(word in shown for word in words[:3])


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
    assert main(["eval", out, "--lengths", "12", "24", "--examples", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "run" / "results.json").read_text())
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


def test_a_command_is_one_module_and_one_entry(monkeypatch, capsys):
    module = types.ModuleType("traformer.commands.made_up")
    module.add_arguments = lambda parser: parser.add_argument("word")
    module.main = lambda args: print(args.word)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "made_up", (module.__name__, "print a word"))
    assert main(["made_up", "hello"]) == 0 and capsys.readouterr().out == "hello\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "print a word" in capsys.readouterr().out
    assert main(["completion", "--candidates", "made"]) == 0 and capsys.readouterr().out == "made_up\n"


def test_an_experiment_is_one_module_and_one_entry(monkeypatch, capsys):
    module = types.ModuleType("traformer.experiments.made_up")
    module.cells = lambda: [Cell("only", RunConfig(steps=3, attention="rope"), lengths="8", examples=4)]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(EXPERIMENTS, "made_up", "one cell")
    assert main(["list", "experiments"]) == 0 and "made_up" in capsys.readouterr().out.split()
    assert main(["sweep", "made_up", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "--attention rope" in listed and "tra eval runs/made_up/only" in listed
