"""`tra train`: flags to a RunConfig, and the run. A flag left out takes the config file's value, or the default."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from traformer.commands.arguments import key_value, positive_int
from traformer.errors import InputError
from traformer.experiments.configs import read_config
from traformer.methods import resolve_method
from traformer.runs.config import DTYPES, RunConfig
from traformer.terminal import say

# flag -> the TraformerConfig field it overrides
_MODEL_FLAGS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "width": "hidden_size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = RunConfig()
    parser.set_defaults(**dict.fromkeys(("dropout", "length", *_MODEL_FLAGS)))

    run = parser.add_argument_group("the run folder")
    run.add_argument("--out", metavar="DIR", help="where it goes (default: runs/TASK-ATTENTION-seedN)")
    run.add_argument("--config", metavar="FILE", help="a config.yaml or text-small|laptop|paper; flags beside it win")
    again = run.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint of --out")
    again.add_argument("--overwrite", action="store_true", help="delete the run that is in --out and start again")

    # argparse.SUPPRESS: what was not given does not appear, so that a config file or a resumed run can speak.
    def setting(group: Any, name: str, kind: Any, help_text: str, **more: Any) -> None:
        shown = getattr(default, name)
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=argparse.SUPPRESS,
            help=help_text + (f" (default {shown})" if shown not in (None, {}) else ""),
            **more,
        )

    task = parser.add_argument_group("the task")
    setting(task, "task", str, "see `tra list tasks`")
    task.add_argument("--length", type=positive_int, help="the longest training length, in the task's unit")
    task.add_argument("--task-option", type=key_value, action="append", default=[], metavar="NAME=VALUE")

    model = parser.add_argument_group("the model")
    setting(model, "attention", str, "see `tra list attentions`")
    model.add_argument("--attention-option", type=key_value, action="append", default=[], metavar="NAME=VALUE")
    setting(model, "preset", str, "see `tra list presets`")
    for flag in _MODEL_FLAGS:
        model.add_argument(f"--{flag.replace('_', '-')}", type=positive_int, help=f"in place of the preset's {flag}")
    model.add_argument("--dropout", type=float, help="all dropouts, in place of the preset's")
    model.add_argument("--model-option", type=key_value, action="append", default=[], metavar="NAME=VALUE")

    optimise = parser.add_argument_group("the optimisation")
    setting(optimise, "steps", positive_int, "optimizer steps")
    setting(optimise, "batch_size", positive_int, "examples a step, over all processes")
    setting(optimise, "accumulate", positive_int, "micro-batches a step: less memory, the same gradient")
    setting(optimise, "lr", float, "peak learning rate of AdamW")
    setting(optimise, "warmup", float, "share of the steps in which lr rises; then it falls along a cosine")
    setting(optimise, "min_lr", float, "where the cosine ends")
    setting(optimise, "weight_decay", float, "of AdamW")
    setting(optimise, "beta1", float, "of AdamW")
    setting(optimise, "beta2", float, "of AdamW")
    setting(optimise, "clip", float, "largest gradient norm")
    setting(optimise, "seed", int, "of the weights, the examples and the dropout")
    setting(optimise, "dtype", str, "bfloat16 computes under autocast", choices=DTYPES)

    machine = parser.add_argument_group("the machine")
    setting(machine, "device", str, "cpu, cuda, cuda:1 or auto")
    setting(machine, "threads", positive_int, "threads of torch on the CPU")
    machine.add_argument(
        "--parallel", choices=("ddp", "fsdp"), help="under torchrun or accelerate launch: how to share (default ddp)"
    )
    setting(machine, "log_every", positive_int, "steps between lines of metrics.jsonl")
    setting(machine, "save_every", positive_int, "steps between checkpoints")
    setting(machine, "keep", positive_int, "checkpoints kept")
    machine.add_argument(
        "--tensorboard", action="store_true", default=argparse.SUPPRESS, help="also write TensorBoard files"
    )


def main(args: argparse.Namespace) -> None:
    given = given_settings(args)
    if args.resume:
        config, out = resumed_config(args, given)
    else:
        base = read_config(args.config).to_dict() if args.config else {}
        merged = _merge(base, given)
        config = RunConfig.from_dict(merged)
        resolve_method(config.attention, config.attention_options)
        if config.task == "text" and not merged["task_options"].get("data"):
            from traformer.data.corpus import DEFAULT_NOTE

            say(DEFAULT_NOTE)
        out = args.out or f"runs/{config.task}-{config.attention}-seed{config.seed}"

    import os

    from traformer.training.loop import train

    result = train(config, out, resume=args.resume, overwrite=args.overwrite, parallel=args.parallel)
    if os.environ.get("RANK", "0") == "0":
        last = result.last
        if last:
            print(f"{out}: step {result.step}, loss {last['loss']:.4f}, answer accuracy {last['accuracy']:.4f}")
        print(f"measure it with: tra eval {out}")


def resumed_config(args: argparse.Namespace, given: dict[str, Any]) -> tuple[RunConfig, str]:
    from traformer.runs.folder import RunFolder

    if not args.out:
        raise InputError("--resume needs --out: the run folder to go on with")
    folder = RunFolder.open(args.out)
    stored = folder.read_config()
    if args.config:
        given = _merge(read_config(args.config).to_dict(), given)
    wanted = _merge(stored.to_dict(), given)
    return stored.for_resume({name: wanted[name] for name in given}, folder.path), args.out


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were named on the command line, in RunConfig's names."""
    names = RunConfig().to_dict()
    given = {name: value for name, value in vars(args).items() if name in names}
    task_options, model_options = dict(args.task_option), dict(args.model_option)
    if args.length is not None:
        task_options[_LENGTH] = args.length
    for flag, field in _MODEL_FLAGS.items():
        if getattr(args, flag) is not None:
            model_options[field] = getattr(args, flag)
    if args.dropout is not None:
        model_options.update(attention_dropout=args.dropout, hidden_dropout=args.dropout)
    for name, options in (
        ("task_options", task_options),
        ("attention_options", dict(args.attention_option)),
        ("model_options", model_options),
    ):
        if options:
            given[name] = options
    return given


_LENGTH = "--length"  # stands for the task's own length setting until the task is known


def _merge(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `base`; options are merged one by one, unless the task or attention they belong to has changed."""
    merged = {**base, **given}
    for options, owner in (("task_options", "task"), ("attention_options", "attention"), ("model_options", None)):
        same_owner = owner is None or owner not in given or given[owner] == base.get(owner)
        kept = base.get(options, {}) if same_owner else {}
        merged[options] = {**kept, **given.get(options, {})}
    if _LENGTH in merged["task_options"]:
        from traformer.tasks import length_setting

        merged["task_options"][length_setting(merged.get("task", RunConfig.task))] = merged["task_options"].pop(_LENGTH)
    return merged
