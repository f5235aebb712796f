"""`tra list`: the names that the other commands take, and the options of each."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Mapping

from traformer.commands.arguments import add_json, print_json
from traformer.errors import InputError, unknown_name

KINDS = ("tasks", "attentions", "presets", "experiments")
MODEL = "model"  # what `--options` calls TraformerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=KINDS, help="print only the names of this kind, one per line")
    parser.add_argument(
        "--options",
        metavar="NAME",
        help="print the options of this task or attention; `model`: those of --model-option",
    )
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    if args.options is not None:
        if args.kind:
            raise InputError(f"--options {args.options} lists one name's options; leave out {args.kind!r}")
        show_options(args.options, args.json)
        return
    names = {kind: _entries(kind) for kind in ([args.kind] if args.kind else KINDS)}
    if args.json:
        print_json(names)
    elif args.kind:
        print("\n".join(names[args.kind]))
    else:
        width = max(len(name) for entries in names.values() for name in entries)
        for kind, entries in names.items():
            print(kind)
            for name, summary in entries.items():
                print(f"  {name:<{width}}  {summary}".rstrip())
        print("options of a task or an attention: tra list --options NAME")


def _entries(kind: str) -> dict[str, str]:
    """Name -> one line about it."""
    if kind == "tasks":
        from traformer.tasks import TASKS

        return {name: _paragraphs(task)[0] for name, task in TASKS.items()}
    if kind == "attentions":
        from traformer.methods import METHODS

        return {name: method.summary for name, method in METHODS.items()}
    if kind == "presets":
        from traformer.presets import PRESETS

        return {name: ", ".join(f"{key} {value}" for key, value in preset.items()) for name, preset in PRESETS.items()}
    from traformer.experiments import EXPERIMENTS

    return dict(EXPERIMENTS)


# Options --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one name, each with its default and, where there is one, a line of help."""

    flag: str
    about: str
    table: Mapping[str, tuple[object, str]]


def options_of(name: str) -> Options:
    """The options of a task, an attention, or `model`."""
    from traformer.methods import METHODS
    from traformer.tasks import TASKS

    if name in TASKS:
        fields = dataclasses.fields(TASKS[name])  # type: ignore[arg-type]
        about = "\n\n".join(_paragraphs(TASKS[name]))
        return Options("--task-option", about, {item.name: (item.default, "") for item in fields})
    if name in METHODS:
        method = METHODS[name]
        table = {key: (method.all_options[key], option.help) for key, option in method.option_table.items()}
        return Options("--attention-option", method.summary, table)
    if name == MODEL:
        return _model_options()
    raise unknown_name("task or attention", name, [*TASKS, *METHODS, MODEL])


def _model_options() -> Options:
    from traformer.models import TraformerConfig
    from traformer.models.from_run import DECIDED_BY_RUN

    own = [item for item in dataclasses.fields(TraformerConfig) if item.name in TraformerConfig.__annotations__]
    table = {item.name: (item.default, "") for item in own if item.name not in (*DECIDED_BY_RUN, "format_version")}
    return Options("--model-option", "\n\n".join(_paragraphs(TraformerConfig)), table)


def show_options(name: str, as_json: bool) -> None:
    options = options_of(name)
    if as_json:
        rows = [{"name": key, "default": default, "help": text} for key, (default, text) in options.table.items()]
        print_json({"name": name, "flag": options.flag, "options": rows})
        return
    print(f"{name}: {options.about}\n")
    if not options.table:
        print(f"{name} has no options")
        return
    print(f"options, each given as {options.flag} NAME=VALUE:")
    width = max(len(key) for key in options.table)
    for key, (default, text) in options.table.items():
        shown = json.dumps(default, default=str)
        print(f"  {key:<{width}}  {text}{' ' if text else ''}(default {shown})")


def _paragraphs(thing: object) -> list[str]:
    """The docstring's paragraphs, without their indentation."""
    return (inspect.getdoc(thing) or "").split("\n\n")
