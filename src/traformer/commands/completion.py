"""`tra completion SHELL`: a script that completes commands, flags and names in bash, zsh or fish. Loads no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from traformer.errors import InputError, TraformerError

# Each script asks `tra completion --candidates WORD...` for what may replace the last word; where it has
# no answer, the shell completes files.
SCRIPTS = {
    "bash": """\
_tra() {
  local IFS=$'\\n'
  COMPREPLY=($(tra completion --candidates "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
}
complete -o default -F _tra tra
""",
    "zsh": """\
#compdef tra
_tra() {
  local -a found
  found=("${(@f)$(tra completion --candidates "${(@)words[2,CURRENT]}" 2> /dev/null)}")
  if [[ -n "${found[1]}" ]]; then compadd -- "${found[@]}"; else _files; fi
}
compdef _tra tra
""",
    "fish": """\
function __tra_candidates
  set -l words (commandline -opc) (commandline -ct)
  tra completion --candidates $words[2..-1] 2> /dev/null
end
complete -c tra -a '(__tra_candidates)'
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        nargs="?",
        choices=SCRIPTS,
        help="the shell; for bash, put `source <(tra completion bash)` into ~/.bashrc",
    )
    parser.add_argument("--candidates", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> None:
    if args.candidates is not None:
        print("\n".join(candidates(args.candidates)))
    elif args.shell is None:
        raise InputError(f"which shell? Give one of {', '.join(SCRIPTS)}")
    else:
        print(SCRIPTS[args.shell], end="")


def candidates(words: Sequence[str]) -> list[str]:
    """What may replace the last of the words that follow `tra`; nothing where a file name may."""
    from traformer.cli import build_parser

    *before, current = [word for word in words if word != "="] or [""]  # bash gives --flag=value as three words
    try:
        parser, rest = _deepest(build_parser(before), before)
    except (TraformerError, SystemExit):
        return []
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    name, equals, value = current.partition("=")
    if equals and name in flags:
        return [f"{name}={found}" for found in _matching(_values(flags[name]), value)]
    if current.startswith("-"):
        return sorted(flag for flag in flags if flag.startswith(current) and (flag.startswith("--") or current == flag))
    if rest and rest[-1] in flags and flags[rest[-1]].nargs != 0:
        return _matching(_values(flags[rest[-1]]), current)
    positional = _positional(parser, rest, flags)
    return [] if positional is None else _matching(_values(positional), current)


def _deepest(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the command, or the command's command, that the words name; and the words after its name."""
    rest = list(words)
    while (group := _subcommands(parser)) is not None:
        place = next((number for number, word in enumerate(rest) if word in group.choices), None)
        if place is None:
            break
        parser, rest = group.choices[rest[place]], rest[place + 1 :]
    return parser, rest


def _subcommands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction | None:
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _positional(
    parser: argparse.ArgumentParser, words: Sequence[str], flags: Mapping[str, argparse.Action]
) -> argparse.Action | None:
    """The positional argument that comes next."""
    given = 0
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        is_value = before in flags and flags[before].nargs != 0
        given += not word.startswith("-") and not is_value
    expected = [action for action in parser._actions if not action.option_strings]
    if given < len(expected):
        return expected[given]
    return expected[-1] if expected and expected[-1].nargs in ("+", "*") else None


def _values(action: argparse.Action) -> list[str]:
    """What an argument takes: its choices, or the names of its kind."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    return NAMES[action.dest]() if action.dest in NAMES else []


def _matching(values: Sequence[str], current: str) -> list[str]:
    """Those that begin with what is typed; of a list `a,b` its last part is completed."""
    head, comma, last = current.rpartition(",")
    return [head + comma + value for value in values if value.startswith(last)]


def _attentions() -> list[str]:
    from traformer.methods import METHODS

    return list(METHODS)


def _tasks() -> list[str]:
    from traformer.tasks import TASKS

    return list(TASKS)


def _presets() -> list[str]:
    from traformer.presets import PRESETS

    return list(PRESETS)


def _experiments() -> list[str]:
    from traformer.experiments import EXPERIMENTS

    return list(EXPERIMENTS)


def _tables() -> list[str]:
    from traformer.experiments.paper import TABLE_NAMES

    return [*TABLE_NAMES, "all"]


# By the name under which commands store an argument.
NAMES: dict[str, Callable[[], list[str]]] = {
    "attention": _attentions,
    "task": _tasks,
    "preset": _presets,
    "experiment": _experiments,
    "table": _tables,
    "options": lambda: [*_tasks(), *_attentions(), "model"],
}
