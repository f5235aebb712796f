"""The steps of `tra reproduce upcycle`: convert, tune in two stages, measure. What is done is not done again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from traformer.errors import InputError
from traformer.evaluation.perplexity import measure_perplexity, safe_exp
from traformer.evaluation.recall_at_depth import ask, make_facts, plant, prefill
from traformer.evaluation.recall_by_layer import recall_by_layer
from traformer.experiments import upcycle
from traformer.experiments.upcycle import ARMS, HYBRID, LAYERS, UNTUNED, Plan
from traformer.models.conversion.convert import convert
from traformer.models.from_run import load_run
from traformer.models.pretrained import settings_from
from traformer.models.sources import load_source
from traformer.runs.checkpoint import all_checkpoints
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Job, Measurement, Request, ResultStore, measure_missing
from traformer.storage import make_folder, write_atomically
from traformer.tasks.text import Text
from traformer.training.loop import train

STUDY = "upcycle"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Upcycle:
    """Where one execution of the experiment keeps things, and what it works on."""

    plan: Plan
    out: Path
    model: str  # the source as the user named it
    data: str
    threads: int | None
    say: Say

    @property
    def source(self) -> Path:
        """The source in plain floats with its tokenizer: quick to load, the same for every step."""
        return self.out / "source"

    @property
    def pattern_file(self) -> Path:
        return self.out / "attention.txt"

    @property
    def hybrid(self) -> Path:
        return self.out / "hybrid"

    def run_folder(self, arm: str) -> Path:
        return self.out / {LAYERS: "layers", HYBRID: "logits"}[arm]

    def store(self, arm: str) -> ResultStore:
        folder = self.out / "measured" / arm
        folder.mkdir(parents=True, exist_ok=True)
        return ResultStore(folder)


# Converting and tuning ----------------------------------------------------------------------------------------


def prepare(work: Upcycle) -> Upcycle:
    """The source's plain copy and the hybrid, untuned; the result knows which layers are which."""
    known = _kept_pattern(work)
    if not (work.source / "tokenizer.json").is_file():
        work.say(f"loading {work.model}")
        model, tokenizer = load_source(work.model)
        if tokenizer is None:
            raise InputError(f"{work.model} has no tokenizer that transformers can load, so no text can be read")
        _save(plain(model), tokenizer, work.source)
    pattern = known or _find_pattern(work)
    write_atomically(work.pattern_file, pattern + "\n")
    work = replace(work, plan=replace(work.plan, attention=pattern))
    if not (work.hybrid / "tokenizer.json").is_file():
        model, tokenizer = load_source(str(work.source))
        options: dict[str, Any] = {
            "rope": {"sliding_window": work.plan.window, "sinks": work.plan.sinks},
            upcycle.NEW: {"temperature": True},
        }
        names = set(pattern.split(","))
        options = {name: own for name, own in options.items() if name in names}
        if len(names) == 1:  # then options are not given by name
            options = options.get(pattern, {})
        hybrid = convert(model, pattern, copy=False, qk_norm=False, **options)
        _save(hybrid, tokenizer, work.hybrid)
        work.say(f"{work.hybrid}: attention {pattern}, not tuned yet")
    return work


def _kept_pattern(work: Upcycle) -> str | None:
    """The pattern that was asked for or is known from before; None: it must be found.

    The folder belongs to one pattern: what another has left in it must not be measured as this one's.
    """
    make_folder(work.out)
    if not work.pattern_file.is_file():
        return work.plan.attention
    before = work.pattern_file.read_text(encoding="utf-8").strip()
    if work.plan.attention not in (None, before):
        raise InputError(
            f"{work.out} holds the experiment with --attention {before}; give --out another folder for "
            f"{work.plan.attention}"
        )
    return before


def _find_pattern(work: Upcycle) -> str:
    """TRA where the source recalls, by training text within its window; what was measured is kept."""
    work.say("looking for the layers that recall")
    text = Text(data=(work.data,), tokenizer=str(work.source.absolute()), length=work.plan.length)
    found = recall_by_layer(
        load_source(str(work.source))[0].eval(), text.text_tokenizer, text.open("train").tokens,
        progress=lambda title, done, total: work.say(f"{done} of {total}: {title}"),
    )  # fmt: skip
    write_atomically(work.out / "recall_by_layer.json", json.dumps(asdict(found), indent=1) + "\n")
    return found.pattern(upcycle.NEW)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last, so that its file says that all is there


def plain(model: Any) -> Any:
    """A model that was loaded from GGUF without the mark of its quantizer, which transformers would not save."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    return model


def tune(work: Upcycle) -> None:
    """Both stages under the durable loop; an interrupted one continues from its newest checkpoint."""
    plan = work.plan
    common: dict[str, Any] = {
        "teacher": str(work.source), "log_every": 5, "save_every": plan.save_every, "keep": 1000,
        "threads": work.threads, "clip": 1.0,
    }  # fmt: skip
    layers = RunConfig.from_dict({
        **_settings(work, work.hybrid, plan.length), **common, "objective": "layers", "steps": plan.layer_steps,
        "batch_size": plan.batch_size, "lr": plan.layer_lr,
    })  # fmt: skip
    _train(layers, work.run_folder(LAYERS), work.say)
    logits = RunConfig.from_dict({
        **_settings(work, work.run_folder(LAYERS), plan.logit_length), **common, "objective": "logits",
        "train_only": "attention", "steps": plan.logit_steps, "batch_size": 1,
        "lr": plan.logit_lr,
    })  # fmt: skip
    _train(logits, work.run_folder(HYBRID), work.say)


def _settings(work: Upcycle, start: Path, length: int) -> dict[str, Any]:
    settings = settings_from(start)
    options = {"data": [work.data], "length": length, "tokenizer": str(work.source.absolute())}
    return {**settings, "task": "text", "task_options": options, "from_model": str(start)}


def _train(config: RunConfig, path: Path, say: Say) -> None:
    folder = RunFolder(path)
    resume = folder.is_run()
    if resume:
        config = folder.read_config().for_resume({"threads": config.threads, "save_every": config.save_every}, path)
    say(f"{path}: {config.objective}, {config.steps} steps of {config.batch_size} x {config.task_options['length']}")
    train(config, path, resume=resume)


# The arms -----------------------------------------------------------------------------------------------------


def load_arm(work: Upcycle, arm: str) -> Any:
    """An arm's model in eval mode."""
    if arm in (LAYERS, HYBRID):
        return load_run(work.run_folder(arm), device="cpu")[0]
    model = load_source(str(work.hybrid if arm == UNTUNED else work.source))[0].eval()
    factor = work.plan.longest / trained_length(work, model.config)
    if arm == upcycle.INTERPOLATED:
        set_rotary(model, factor=factor)
    elif arm == upcycle.NTK:
        set_rotary(model, ntk=factor)
    elif arm == upcycle.WINDOWS:
        model = convert(model, "rope", copy=False, sliding_window=work.plan.window, sinks=work.plan.sinks).eval()
    return model


def trained_length(work: Upcycle, config: Any) -> int:
    return work.plan.trained or int(config.max_position_embeddings)


def set_rotary(model: Any, factor: float = 1.0, ntk: float = 1.0) -> None:
    """Another reading of positions in a source with rotary embedding.

    factor   positions are divided by it (interpolation: Chen et al. 2023)
    ntk      the base is raised so that the slowest channel turns as if positions were divided by it, and the fastest as
             before ("NTK-aware" scaling)
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        raise InputError(f"{type(model).__name__} has no rotary embedding to scale")
    channels = 2 * rotary.inv_freq.shape[0]
    theta = float((model.config.rope_parameters or {}).get("rope_theta", 10_000.0)) * ntk ** (channels / (channels - 2))
    turns = theta ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels) / factor
    rotary.inv_freq.copy_(turns.to(rotary.inv_freq.dtype))


# Measuring ----------------------------------------------------------------------------------------------------


def measure(work: Upcycle, arms: list[str]) -> None:
    """Everything that is missing: each length for all arms before the next one, each number stored at once."""
    text = Text(data=(work.data,), tokenizer=str(work.source.absolute()), length=work.plan.length)
    steps = {arm: _step(work, arm) for arm in arms}
    jobs = [Job(request(steps[arm]), work.store(arm), (arm, kind)) for kind, request in _requests(work) for arm in arms]
    for _ in measure_missing(jobs, partial(_measure, work, text)):
        pass


def _step(work: Upcycle, arm: str) -> int:
    """How far an arm's tuning has come."""
    return RunFolder(work.run_folder(arm)).find_checkpoint().step if arm in (LAYERS, HYBRID) else 0


def _requests(work: Upcycle) -> Iterator[tuple[str, Callable[[int], Request]]]:
    """What is measured of every arm: the shortest window, the longest, those between, then recall."""
    plan, data = work.plan, Path(work.data).name
    for window in (plan.windows[0], plan.windows[-1], *plan.windows[1:-1]):
        yield "perplexity", partial(_request, "validation", window, 1, {"data": data, "tokens": plan.tokens})
    for length in plan.recall_lengths:
        protocol = {"data": data, "facts": plan.facts, "texts": plan.texts}
        yield "recall", partial(_request, "recall", length, plan.texts, protocol)


def _request(split: str, length: int, examples: int, protocol: dict[str, Any], step: int) -> Request:
    return Request(split, length, step, examples, 0, STUDY, protocol)


def _measure(work: Upcycle, text: Text, job: Job[tuple[str, str]]) -> list[Measurement]:
    request, (arm, kind) = job.request, job.subject
    length = int(request.length)
    work.say(f"measuring {kind} at {length:,}: {ARMS[arm]}")
    model = load_arm(work, arm)
    make = partial(
        Measurement, task="text", split=request.split, length=length, examples=request.examples, seed=request.seed,
        attention=arm, step=request.step, train_length=work.plan.length, study=STUDY, protocol=request.protocol,
    )  # fmt: skip
    if kind == "perplexity":
        return list(_perplexity(work, model, text, length, make))
    return list(_recall(work, model, text, length, make))


def _perplexity(work: Upcycle, model: Any, text: Text, window: int, make: Any) -> Iterator[Measurement]:
    found = measure_perplexity(model, text.open("validation"), window, tokens=work.plan.tokens)
    low, high = (safe_exp(loss) for loss in found.interval())
    yield make(metric="perplexity", value=safe_exp(found.loss), low=low, high=high, counted=found.scored)
    for first, last, loss, count in found.by_position():
        place = {"place": first, "to": last}
        yield make(metric="loss_by_place", value=loss, low=None, high=None, at=place, counted=count)


def _recall(work: Upcycle, model: Any, text: Text, length: int, make: Any) -> Iterator[Measurement]:
    plan, tokens = work.plan, text.open("validation").tokens
    prefill(model, tokens[:16].tolist())  # what the first call sets up is not timed
    readings = []
    for number in range(plan.texts):
        facts = make_facts(plan.facts, seed=number)
        facts = facts[1:] + facts[:1] if number % 2 else facts  # where one text has a pass key, the next has a sentence
        filler = tokens[number * length :] if len(tokens) >= (number + 1) * length else tokens
        ids, depths = plant(text.text_tokenizer, filler, facts, length)
        readings.append(ask(model, text.text_tokenizer, ids, facts, depths))
    make = partial(make, low=None, high=None)
    by_place: dict[tuple[str, float], list[bool]] = {}
    for reading in readings:
        for one in reading.recalls:
            by_place.setdefault((one.kind, one.depth), []).append(one.is_right)
    for (kind, depth), right in sorted(by_place.items()):
        at = {"depth": depth, "kind": kind}
        yield make(metric="recall_at_depth", value=sum(right) / len(right), at=at, counted=len(right))
    for name in ("prefill", "decode"):
        count = sum(getattr(reading, f"{name}_tokens") for reading in readings)
        seconds = sum(getattr(reading, f"{name}_seconds") for reading in readings)
        yield make(metric=f"{name}_speed", value=count / seconds, counted=count)


# What tuning gave, by tokens ----------------------------------------------------------------------------------


def tuning_curve(work: Upcycle) -> None:
    """Perplexity of a little validation text at the second shortest window, for every checkpoint of both stages."""
    plan = work.plan
    window = plan.windows[1]
    text = Text(data=(work.data,), tokenizer=str(work.source.absolute()), length=window)
    tokens = min(plan.tokens, 4 * window)
    store = work.store("tuning")
    for arm in (LAYERS, HYBRID):
        folder = RunFolder(work.run_folder(arm))
        if not folder.is_run():
            continue
        for step in [one.step for one in all_checkpoints(folder.checkpoints)]:
            protocol = {"data": Path(work.data).name, "tokens": tokens}
            request = Request(arm, window, step, 1, 0, STUDY, protocol)
            if not store.missing([request]):
                continue
            model = load_run(folder.path, device="cpu", step=step)[0]
            found = measure_perplexity(model, text.open("validation"), window, tokens=tokens)
            trained = step * folder.read_config().batch_size * int(folder.read_config().task_options["length"])
            store.put([
                Measurement(
                    task="text", split=arm, length=window, metric="perplexity", value=safe_exp(found.loss),
                    low=None, high=None, examples=1, seed=0, attention=arm, step=step, train_length=plan.length,
                    counted=found.scored, study=STUDY, at={"tuning_tokens": trained}, protocol=protocol,
                )
            ])  # fmt: skip
