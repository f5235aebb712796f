"""`tra train`: flags to a RunConfig, and the run. A flag left out takes the config file's value, or the default.

The flags and their help come from RunConfig's fields; added here are only those that stand for several settings.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from traformer.commands.arguments import key_value, options_once, positive_int
from traformer.errors import InputError, unknown_name
from traformer.experiments.configs import read_config
from traformer.methods import resolve_stack
from traformer.runs.config import RunConfig, flag_of, setting_of
from traformer.terminal import say
from traformer.types import JsonObject, Options

# flag: the settings of TraformerConfig it sets, and its help
_MODEL_FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "layers": (("num_hidden_layers",), "decoder blocks, in place of the preset's"),
    "heads": (("num_attention_heads",), "attention heads per block, in place of the preset's"),
    "kv_heads": (("num_key_value_heads",), "heads of keys and values, fewer than --heads (default: as many)"),
    "width": (("hidden_size",), "size of the hidden states, in place of the preset's"),
    "dropout": (("attention_dropout", "hidden_dropout"), "dropout probability, everywhere (presets: 0.01)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run folder")
    run.add_argument("--out", metavar="DIR", help="where the run goes (default: runs/TASK-ATTENTION-seedN)")
    run.add_argument(
        "--config", metavar="FILE", help="a config.yaml, or text-small, text-laptop or text-paper; flags override it"
    )
    again = run.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue the run in --out from its newest checkpoint")
    again.add_argument("--overwrite", action="store_true", help="delete the run in --out and start again")
    fields = dataclasses.fields(RunConfig)
    titles = dict.fromkeys(setting_of(item).group for item in fields)
    groups = {title: parser.add_argument_group(title) for title in titles}
    for item in fields:
        _add_setting(groups[setting_of(item).group], item)
    groups["task"].add_argument("--length", type=positive_int, help="longest training length, in the task's own unit")
    for flag, (_, text) in _MODEL_FLAGS.items():
        kind: Callable[[str], float] = float if flag == "dropout" else positive_int
        groups["model"].add_argument(f"--{flag.replace('_', '-')}", type=kind, metavar="N", help=text)
    groups["machine and logging"].add_argument(
        "--parallel", choices=("ddp", "fsdp"), help="how processes of torchrun share the work (default ddp)"
    )


def _add_setting(group: Any, item: dataclasses.Field[Any]) -> None:
    """The flag of one field. What is not given does not appear, so that a config file or a resumed run decides."""
    about, kind = setting_of(item), str(item.type).split(" | ")[0].split("[")[0]
    flag = flag_of(item)
    if kind == "dict":
        text = f"{about.help}; repeatable"
        group.add_argument(flag, type=key_value, action="append", default=[], metavar="NAME=VALUE", help=text)
        return
    shown = about.unless_given if item.default is None else item.default
    if kind == "bool":
        group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=about.help)
        return
    types: dict[str, Callable[[str], object]] = {"int": positive_int if about.least == 1 else int, "float": float}
    group.add_argument(
        flag,
        dest=item.name,
        type=types.get(kind, str),
        default=argparse.SUPPRESS,
        metavar=None if about.choices else {"int": "N", "float": "X"}.get(kind, "DIR" if about.flag else "NAME"),
        choices=about.choices or None,
        help=f"{about.help} (default {shown})",
    )


def main(args: argparse.Namespace) -> None:
    given = given_settings(args)
    if args.resume:
        config, out = resumed_config(args, given)
    else:
        base = read_config(args.config).to_dict() if args.config else {}
        if "from_model" in given:
            base = started_from(base, given)
        merged = _merge(base, given)
        config = RunConfig.from_dict(merged)
        check_names(config)
        from traformer.tasks import task_class

        if notice := task_class(config.task).notice(merged.get("task_options", {})):
            say(notice)
        out = args.out or f"runs/{config.task}-{config.attention}-seed{config.seed}"

    import os

    from traformer.training.loop import train

    result = train(config, out, resume=args.resume, overwrite=args.overwrite, parallel=args.parallel)
    if os.environ.get("RANK", "0") == "0":
        last = result.last
        if last:
            right = "" if last["accuracy"] is None else f", answer accuracy {last['accuracy']:.4f}"
            print(f"{out}: step {result.step}, loss {last['loss']:.4f}{right}")
        print(f"measure it with: tra eval {out}")


def started_from(base: Options, given: Options) -> JsonObject:
    """`base` with the model of `--from`, and with that run's task and options where no others are named."""
    shape = {"attention", "attention_options", "preset", "model_options"} & set(given)
    if set(given.get("model_options", ())) <= {"attention_dropout", "hidden_dropout"}:
        shape.discard("model_options")
    if shape:
        raise InputError(f"--from brings its own model; leave out what sets its {sorted(shape)[0].replace('_', ' ')}")
    from traformer.models.pretrained import settings_from

    settings = settings_from(given["from_model"])
    dropouts = {name: value for name, value in base.get("model_options", {}).items() if name.endswith("_dropout")}
    settings["model_options"] |= dropouts
    task, options = settings.pop("task", None), settings.pop("task_options", {})
    if base.get("task", task) == task and task is not None:
        settings |= {"task": task, "task_options": {**options, **base.get("task_options", {})}}
    return {**base, **settings}


def check_names(config: RunConfig) -> None:
    """Refuse a mistyped name or option at once, before torch is loaded."""
    from traformer.presets import PRESETS
    from traformer.tasks import build_task

    build_task(config.task, config.task_options)
    resolve_stack(config.attention, config.attention_options)
    if config.preset not in PRESETS and not (config.preset == "converted" and config.from_model):
        raise unknown_name("preset", config.preset, PRESETS)


def resumed_config(args: argparse.Namespace, given: JsonObject) -> tuple[RunConfig, str]:
    from traformer.runs.folder import RunFolder

    if not args.out:
        raise InputError("--resume needs --out: the run folder to continue")
    folder = RunFolder.open(args.out)
    stored = folder.read_config()
    if args.config:
        given = _merge(read_config(args.config).to_dict(), given)
    wanted = _merge(stored.to_dict(), given)
    return stored.for_resume({name: wanted[name] for name in given}, folder.path), args.out


def given_settings(args: argparse.Namespace) -> JsonObject:
    """The settings that were named on the command line, in RunConfig's names."""
    names = {item.name for item in dataclasses.fields(RunConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    options = {name: options_once(f"--{name.replace('_', '-')}", getattr(args, name)) for name in _OPTIONS}
    if args.length is not None:
        options["task_option"][_LENGTH] = args.length
    for flag, (settings, _) in _MODEL_FLAGS.items():
        value = getattr(args, flag)
        for name in settings if value is not None else ():
            if name in options["model_option"]:
                raise InputError(f"--{flag.replace('_', '-')} and --model-option {name} set the same; give one of them")
            options["model_option"][name] = value
    return {**given, **{f"{name}s": chosen for name, chosen in options.items() if chosen}}


_OPTIONS = ("task_option", "attention_option", "model_option")
_LENGTH = "--length"  # stands for the task's own length setting until the task is known


def _merge(base: Options, given: Options) -> JsonObject:
    """`given` over `base`; options are merged one by one, unless the task or attention they belong to has changed."""
    merged = {**base, **given}
    for options, owner in (("task_options", "task"), ("attention_options", "attention"), ("model_options", None)):
        same_owner = owner is None or owner not in given or given[owner] == base.get(owner)
        kept = base.get(options, {}) if same_owner else {}
        merged[options] = {**kept, **given.get(options, {})}
    if _LENGTH in merged["task_options"]:
        from traformer.tasks import length_setting

        name = length_setting(merged.get("task", RunConfig.task))
        if name in given["task_options"]:
            raise InputError(f"--length and --task-option {name} set the same; give one of them")
        merged["task_options"][name] = merged["task_options"].pop(_LENGTH)
    return merged
