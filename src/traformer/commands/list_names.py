"""`tra list`: the names that the other commands take."""

from __future__ import annotations

import argparse

KINDS = ("tasks", "attentions", "presets", "experiments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=KINDS, help="only names of this kind, one a line")


def main(args: argparse.Namespace) -> None:
    names = {kind: _entries(kind) for kind in ([args.kind] if args.kind else KINDS)}
    if args.kind:
        print("\n".join(names[args.kind]))
        return
    width = max(len(name) for entries in names.values() for name in entries)
    for kind, entries in names.items():
        print(kind)
        for name, summary in entries.items():
            print(f"  {name:<{width}}  {summary}".rstrip())


def _entries(kind: str) -> dict[str, str]:
    """Name -> one line about it."""
    if kind == "tasks":
        from traformer.tasks import TASKS

        return {name: _first_line(task) for name, task in TASKS.items()}
    if kind == "attentions":
        from traformer.methods import METHODS

        return {name: method.summary for name, method in METHODS.items()}
    if kind == "presets":
        from traformer.presets import PRESETS

        return {
            name: ", ".join(f"{key} {value}" for key, value in dict(preset).items()) for name, preset in PRESETS.items()
        }
    from traformer.experiments import EXPERIMENTS

    return dict(EXPERIMENTS)


def _first_line(thing: object) -> str:
    lines = (thing.__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""
