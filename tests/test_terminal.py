from __future__ import annotations

import io
import subprocess
import sys

from rich.console import Console

from traformer.terminal import ProgressBar, new_table, say, show, warn


def test_lines_go_to_stderr(capsys):
    say("a [bold]line[/]")
    warn("slower")
    assert capsys.readouterr() == ("", "a [bold]line[/]\ntra: warning: slower\n")


def test_a_line_that_nobody_can_read_is_dropped(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    say("into the void")


def test_tables_have_one_look(capsys):
    table = new_table("title", left=["name"], right=["value"])
    table.add_row("a", "1")
    show(table, width=40)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("title") and "name" in lines[2] and max(map(len, lines)) <= 40


def test_a_bar_on_a_terminal_and_lines_in_a_pipe(capsys):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, highlight=False)
    with ProgressBar("{task.fields[loss]}", console=console) as bar:
        bar.start("[x]", 4, loss="high")
        bar.update(completed=4, title="[y]", loss="low")
        bar.say("a line [z]")
    assert "[y]" in screen.getvalue() and "low" in screen.getvalue() and "a line [z]" in screen.getvalue()
    with ProgressBar() as bar:
        bar.start("x", 4)
        bar.update(advance=1)
        bar.say("only this")
    with ProgressBar(quiet=True) as bar:
        bar.say("not this")
    assert capsys.readouterr().err == "only this\n"


def test_it_loads_without_rich():
    code = "import sys, traformer.terminal, traformer.storage; assert not {'rich', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
