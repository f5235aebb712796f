"""The `tra` command: one table of commands, each a module that is imported only when its command is named.

A command module has two functions, `add_arguments(parser)` and `main(args) -> int | None`, and keeps heavy imports
(torch, transformers, matplotlib) inside `main`. To add a command, write the module and add its line to COMMANDS.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from traformer import __version__
from traformer.errors import TraformerError, unknown_name
from traformer.terminal import warn

# command: (module, what `tra --help` says)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "list": ("traformer.commands.list_names", "list tasks, attention methods, presets and experiments"),
    "show": ("traformer.commands.show", "print examples of a task"),
    "data": ("traformer.commands.data", "tokenise text into the cache and report what it contains"),
    "train": ("traformer.commands.train", "train a model into a run folder, or resume one"),
    "eval": ("traformer.commands.evaluate", "measure a run by length, far beyond its training length"),
    "convert": ("traformer.commands.convert", "replace the attention of a pretrained decoder"),
    "layers": ("traformer.commands.layers", "find the layers of a pretrained decoder that recall, to convert these"),
    "generate": ("traformer.commands.generate", "continue a prompt with a run's model, token by token"),
    "diagnose": (
        "traformer.commands.diagnose",
        "measure why a run fails beyond its training length: residue and up-weighting",
    ),
    "stretch": (
        "traformer.commands.stretch",
        "measure accuracy, keys read and time at up to a million tokens",
    ),
    "explore": ("traformer.commands.explore", "write a page that shows what each head looks at, keeps and removes"),
    "report": ("traformer.commands.report", "write report.html and report.md from run folders"),
    "sweep": ("traformer.commands.sweep", "run every cell of an experiment: train, evaluate, report"),
    "reproduce": (
        "traformer.commands.reproduce",
        "reproduce the paper's tables: run what is missing, print them with verdicts",
    ),
    "demo": ("traformer.commands.demo", "train and compare TRA and RoPE on two tasks; takes minutes on two cores"),
    "bench": ("traformer.commands.bench", "measure speed and memory"),
    "completion": ("traformer.commands.completion", "print a tab-completion script for bash, zsh or fish"),
}


class OneSentenceParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other error of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"tra: error: {message} (see `{self.prog} --help`)\n")


def add_commands(
    parser: argparse.ArgumentParser, table: Mapping[str, tuple[str, str]], argv: Sequence[str], kind: str
) -> None:
    """Register every command of the table on `parser`, importing only the one that `argv` names first."""
    if argv and not argv[0].startswith("-") and argv[0] not in table:
        raise unknown_name(kind, argv[0], table)
    subparsers = parser.add_subparsers(metavar=kind.replace(" ", "-"), required=True, title=f"{kind}s")
    for name, (module_name, summary) in table.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if argv and argv[0] == name:
            module: ModuleType = import_module(module_name)
            subparser.set_defaults(run_command=module.main, rest=list(argv[1:]))
            module.add_arguments(subparser)


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = OneSentenceParser(
        prog="tra", description="Train transformers on short sequences and measure them on long ones."
    )
    parser.add_argument("--version", action="version", version=f"traformer {__version__}")
    add_commands(parser, COMMANDS, argv, "command")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 success; 1 a part failed (a cell of a sweep); 2 an error that the user can fix; 130 stopped by Ctrl-C; 143
    stopped by SIGTERM; 141 the reader of the output has gone.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _prepare_output()
    _show_warnings()
    try:
        args = build_parser(argv).parse_args(argv)
        status = args.run_command(args)
        sys.stdout.flush()
        return int(status or 0)
    except TraformerError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command can be given again", 130, kind="")
    except (MemoryError, RuntimeError) as error:
        if (
            not isinstance(error, MemoryError)
            and "allocate memory" not in str(error)
            and "out of memory" not in str(error)
        ):
            raise
        return _fail("memory ran out; give shorter lengths or a smaller batch, or free some")
    except OSError as error:
        return _output_failed(error)


def _prepare_output() -> None:
    """Output that always works: closed streams discard it, narrow encodings get ? for what they lack."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller: `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for good)
        elif hasattr(stream, "reconfigure") and (stream.encoding or "").lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


class _Warnings(logging.Handler):
    """The library's warnings as lines of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def _show_warnings() -> None:
    log = logging.getLogger("traformer")
    if not any(isinstance(handler, _Warnings) for handler in log.handlers):
        log.addHandler(_Warnings(logging.WARNING))


def _fail(message: str, status: int = 2, kind: str = "error: ") -> int:
    with suppress(OSError):
        sys.stdout.flush()  # so that it appears before the error
    with suppress(OSError):
        print(f"tra: {kind}{message}", file=sys.stderr, flush=True)
    return status


def _output_failed(error: OSError) -> int:
    """The status after an error of the system that no command turned into a sentence of its own."""
    try:
        sys.stdout.flush()
    except OSError as again:
        # It is stdout itself. Point it at nothing, so that the interpreter's own flush at the end is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error = again
    if isinstance(error, BrokenPipeError):  # the reader (head, less) has what it wanted
        return 141
    # Files are written through traformer.storage, whose errors name them: what has no name here is the output.
    return _fail(f"{error.filename or 'the output could not be written'}: {error.strerror or error}")


def leave(status: int) -> NoReturn:
    """End the process. One of several leaves at once: threads of a process group that FSDP's meshes still hold can
    otherwise bring down an interpreter that has done all its work."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


if __name__ == "__main__":
    leave(main())
