"""`tra reproduce upcycle`: convert a trained model, tune it, measure it beside its source."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from traformer.errors import InputError, unknown_name

if TYPE_CHECKING:
    from traformer.runs.measurements import Measurement

NAME = "upcycle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("upcycle alone")
    group.add_argument(
        "--model", metavar="MODEL", help="the trained model: a folder, a GGUF file, or a name on the hub"
    )
    group.add_argument(
        "--data", metavar="DIR", help="text with a training and a validation split, such as wikitext-103"
    )
    group.add_argument(
        "--attention", metavar="NAME[,NAME...]",
        help="pattern over the layers, such as tra_straight_through for all (default: TRA in the quarter that recalls)",
    )  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch (default: torch's own choice)")
    group.add_argument("--arms", metavar="NAME[,NAME...]", help="measure these arms only (default: all)")
    group.add_argument("--no-tuning", action="store_true", help="only measure, with what tuning has left so far")


def main(args: argparse.Namespace) -> int:
    from traformer.experiments.upcycle import ARMS, HYBRID, LAYERS, PLANS, verdicts

    if args.scale not in PLANS:
        raise InputError(f"upcycle has no scale {args.scale!r}; give one of {', '.join(PLANS)}")
    if not args.model or not args.data:
        raise InputError("upcycle needs --model (a trained decoder) and --data (text to tune and measure on)")
    for name in ("seeds", "jobs", "ray", "records"):
        if getattr(args, name):
            raise InputError(f"--{name} is for tables of several runs; leave it out with upcycle")
    arms = args.arms.split(",") if args.arms else list(ARMS)
    for arm in arms:
        if arm not in ARMS:
            raise unknown_name("arm", arm, ARMS)

    from traformer.devices import set_threads
    from traformer.experiments.upcycle_run import Upcycle, measure, prepare, trained_length, tune, tuning_curve
    from traformer.models.pretrained import read_model_config
    from traformer.reports.upcycle import markdown, perplexities, recalls, write_upcycle
    from traformer.runs.folder import RunFolder
    from traformer.terminal import say

    set_threads(args.threads)
    out = Path(args.out or f"runs/reproduce-{args.scale}/{NAME}")
    plan = PLANS[args.scale]
    plan = replace(plan, attention=args.attention) if args.attention else plan
    work = Upcycle(plan, out, args.model, args.data, args.threads, say)
    work = prepare(work)
    if not args.no_tuning:
        tune(work)
    tuned = [arm for arm in (LAYERS, HYBRID) if RunFolder(work.run_folder(arm)).is_run()]
    measure(work, [arm for arm in arms if arm not in (LAYERS, HYBRID) or arm in tuned])
    tuning_curve(work)
    found = {arm: newest(rows) for arm in ARMS if (rows := work.store(arm).read())}
    tuning = sorted(work.store("tuning").read(), key=lambda one: (list(ARMS).index(one.split), one.step))
    trained = trained_length(work, read_model_config(work.hybrid))
    judged = verdicts(perplexities(found), recalls(found), work.plan, trained)
    files = write_upcycle(found, tuning, judged, work.plan, out)
    print(markdown(found, tuning, judged, work.plan))
    print("written: " + ", ".join(map(str, files)))
    return 0


def newest(rows: Sequence[Measurement]) -> list[Measurement]:
    """Those of the latest step: an arm that was measured while its tuning was under way has older ones, too."""
    last = max(one.step for one in rows)
    return [one for one in rows if one.step == last]
