"""The training loop. What a step computes depends on the config, the step and the state before it, nothing else."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from traformer.devices import flush_denormals, set_threads
from traformer.errors import Diverged, InputError, RunError, Stopped
from traformer.models import memory
from traformer.models.from_run import build_model, build_model_config, check_same_model, load_weights
from traformer.models.pretrained import check_start, load_start
from traformer.runs import checkpoint as checkpoints
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.storage import check_folder, full_reason, remove_leftovers
from traformer.tasks import Task, build_task
from traformer.training.curriculum import check_curriculum, task_of_step
from traformer.training.loss import AnswerLoss, seed_step
from traformer.training.optimizer import (
    build_optimizer,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from traformer.training.padding import similar_lengths
from traformer.training.parallel import Parallel, whole
from traformer.training.progress import TrainingProgress
from traformer.training.stop import StopRequest
from traformer.training.trained_weights import choose_trained, merged
from traformer.types import JsonObject

UPDATES = "updates.safetensors"  # in a checkpoint of a run with low-rank updates: what learned


@dataclass
class Counters:
    """What the loop counts; saved with every checkpoint."""

    step: int = 0  # steps done
    examples: int = 0
    tokens: int = 0  # without padding
    # Since the last log line, which need not coincide with a checkpoint:
    interval_steps: int = 0
    interval_loss: float = 0.0
    interval_correct: int = 0
    interval_answers: int = 0


@dataclass(frozen=True)
class TrainingResult:
    path: Path
    step: int
    last: JsonObject  # the last line of metrics.jsonl
    seconds: float  # of this execution


def train(
    config: RunConfig,
    path: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    parallel: str | None = None,
    quiet: bool = False,
) -> TrainingResult:
    """Train into the run folder `path`. With `resume`, `config` is what `RunConfig.for_resume` gave."""
    group = Parallel.start(parallel, config.device)
    set_threads(config.threads)
    try:
        with ExitStack() as stack:
            folder = RunFolder(path)
            group.on_main(lambda: _prepare(stack, folder, config, group, resume, overwrite))
            # Every process has its own handler, so that one that is asked to stop informs the others.
            stop = stack.enter_context(StopRequest())
            progress = stack.enter_context(
                TrainingProgress(Path(path).name, config.steps, quiet=quiet or not group.is_main)
            )
            stack.enter_context(flush_denormals())
            return _Run(config, folder, group, progress, stop).train()
    finally:
        group.stop()


def _prepare(
    stack: ExitStack, folder: RunFolder, config: RunConfig, group: Parallel, resume: bool, overwrite: bool
) -> None:
    """In the main process: refuse or clear, lock, and write config.yaml of a new run."""
    check_folder(folder.path)
    if not resume and not overwrite and not folder.is_free():
        raise RunError(
            f"{folder.path} exists; give --resume to continue it, --overwrite to replace it, or another --out"
        )
    if resume:
        RunFolder.open(folder.path)
    if config.tensorboard:
        _require_tensorboard()
    per_process(config, group)
    task = build_task(config.task, config.task_options)
    if resume:
        task.use_files(folder.path)
    task.prepare()
    check_curriculum(task, config.curriculum)
    if config.from_model is not None and not resume:
        check_start(config, task)
    newest = checkpoints.latest_good(folder.checkpoints, lambda text: None) if resume else None
    check_memory(config, task, group, newest.path if newest else None)
    stack.enter_context(folder.lock())
    if resume:
        task.check_files(folder.path)
        return
    if overwrite and not folder.is_free():
        folder.clear()
    environment = {
        "device": str(group.device),
        "threads": torch.get_num_threads(),
        "processes": group.world,
        "parallel": group.kind,
    }
    folder.write_config(config, environment)
    task.write_files(folder.path)


def per_process(config: RunConfig, group: Parallel) -> int:
    """Examples of one process in one micro-batch."""
    parts = config.accumulate * group.world
    if config.batch_size % parts:
        raise InputError(
            f"batch_size {config.batch_size} does not divide by {group.world} processes x {config.accumulate} parts"
        )
    return config.batch_size // parts


def first_example(config: RunConfig, group: Parallel, step: int, part: int) -> int:
    """Index of this process's first example in a part of a step: together they take each index of the step once."""
    return step * config.batch_size + (part * group.world + group.rank) * per_process(config, group)


def check_memory(config: RunConfig, task: Task, group: Parallel, saved: Path | None = None) -> None:
    batch, on_cpu = per_process(config, group), group.device.type == "cpu"
    model_config = build_model_config(config, task, saved)
    need = memory.memory_need(model_config, task.sequence_length, training=True, batch=batch, on_cpu=on_cpu)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if on_cpu else 1
    memory.check_fits(
        need.total(batch) * processes,
        memory.available_memory(group.device),
        f"training {config.batch_size // config.accumulate} sequences of {task.sequence_length} tokens at once",
        "give a shorter --length, a smaller --batch-size or a larger --accumulate",
    )


class _Run:
    """One execution of a run: from the newest checkpoint (or step 0) to the end, or to an interruption."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, group: Parallel, progress: TrainingProgress, stop: StopRequest
    ) -> None:
        self.config, self.folder, self.group, self.progress, self.stop = config, folder, group, progress, stop
        self.task = build_task(config.task, config.task_options)
        self.task.use_files(folder.path)
        self.share = per_process(config, group)
        self.counters = Counters()
        self.saved_step = -1

        checkpoint = group.on_main(self._choose_checkpoint)
        self.model = build_model(config, self.task, checkpoint.path if checkpoint else None)
        self.architecture = type(self.model).__name__
        if config.from_model is not None and (checkpoint is None or config.lora is not None):
            load_start(self.model, config.from_model)
        if checkpoint is not None:
            check_same_model(self.model.config, checkpoint.path, config)
            self.counters = Counters(**checkpoint.state())
            self.saved_step = self.counters.step
            if config.lora is None:
                load_weights(self.model, checkpoint.path)
        loss = self._loss()
        if checkpoint is not None and config.lora is not None:
            load_updates(self.model, checkpoint.path / UPDATES)
        nn.Module.to(self.model, group.device)
        self.model.train()
        lr_scales = {
            name: float(parameter.lr_scale)
            for name, parameter in self.model.named_parameters()
            if hasattr(parameter, "lr_scale")
        }
        self.module = group.wrap(loss, loss.parts_to_shard())
        self.parameters = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.optimizer = build_optimizer(self.parameters, lr_scales, config, group)
        if checkpoint is not None:
            load_optimizer_tensors(
                self.optimizer, self.parameters, load_file(checkpoint.path / "optimizer.safetensors")
            )

    def _loss(self) -> AnswerLoss:
        """What the run minimises, around the model; what does not learn is frozen."""
        config, model = self.config, self.model
        if config.objective == "answers":
            choose_trained(model, config)
            return AnswerLoss(model)
        from traformer.training.distillation import LayerLoss, LogitLoss, load_teacher

        teacher = load_teacher(str(config.teacher), model, self.group.device)
        if config.objective == "logits":
            choose_trained(model, config)
            return LogitLoss(model, teacher, config.teacher_weight)
        loss = LayerLoss(model, teacher, self.task.sequence_length)
        choose_trained(model, config, loss.layers)
        return loss

    def _choose_checkpoint(self) -> checkpoints.Checkpoint | None:
        remove_leftovers(self.folder.checkpoints)
        warn = lambda text: self.progress.say(f"tra: warning: {text}")  # noqa: E731
        checkpoint = checkpoints.latest_good(self.folder.checkpoints, warn)
        step = checkpoint.step if checkpoint else 0
        checkpoints.set_aside_after(self.folder.checkpoints, step)
        checkpoints.rotate(self.folder.checkpoints, self.config.keep)
        if self.folder.metrics_file.exists():
            self.folder.cut_metrics(step, warn)
        if checkpoint:
            self.progress.say(f"resuming from {checkpoint.path}")
        return checkpoint

    def train(self) -> TrainingResult:
        started, cpu_started = time.monotonic(), time.process_time()
        config, counters = self.config, self.counters
        rows = self.folder.read_metrics()
        last = rows[-1] if rows else {}
        if counters.step >= config.steps:
            self.progress.say(f"{self.folder.path} is already complete at step {counters.step}")
            return TrainingResult(self.folder.path, counters.step, last, 0.0)
        interval_started, interval_tokens = started, counters.tokens
        with ExitStack() as stack:
            metrics = stack.enter_context(_MetricsFile(self.folder, self.group.is_main))
            board = stack.enter_context(_tensorboard(self.folder, config, self.group, counters.step))
            while counters.step < config.steps:
                values = self._step()
                step = counters.step
                now = time.monotonic()
                speed = (counters.tokens - interval_tokens) / max(now - interval_started, 1e-9)
                self.progress.step(step, values["loss"], speed)
                if step % config.log_every == 0 or step == config.steps:
                    last = self._log_line(values)
                    clock = {
                        "seconds": round(now - started, 3),
                        "cpu_seconds": round(time.process_time() - cpu_started, 3),
                        "tokens_per_second": round(speed, 1),
                    }
                    metrics.write({**last, "clock": clock})
                    board(last)
                    self.progress.log(step, last["loss"], last["accuracy"], last["lr"], speed)
                    interval_started, interval_tokens = now, counters.tokens
                asked = self.stop.number if self.group.world == 1 else values["stop"]
                if step % config.save_every == 0 or step == config.steps or asked:
                    metrics.sync()
                    self._save()
                if asked and step < config.steps:
                    raise Stopped(
                        f"stopped at step {step} of {config.steps} and saved; "
                        f"continue with: tra train --resume --out {self.folder.path}",
                        asked,
                    )
        seconds = time.monotonic() - started
        self.progress.say(f"{self.folder.path}: done, {config.steps} steps, {seconds:.0f} s in this execution")
        return TrainingResult(self.folder.path, counters.step, last, seconds)

    def _step(self) -> JsonObject:
        """One optimizer step over the global batch; returns its loss, gradient norm and rate."""
        config, group, counters = self.config, self.group, self.counters
        step = counters.step
        task = task_of_step(self.task, step, config.steps, config.curriculum)
        batches = [
            task.examples(
                seed=config.seed,
                start=first_example(config, group, step, part),
                count=self.share,
            )
            for part in range(config.accumulate)
        ]
        batches = [piece for batch in batches for piece in similar_lengths(task, batch, group.device)]
        answers, tokens, stop = group.sum(
            sum(int(batch.answers[:, 1:].sum()) for batch in batches),
            sum(int(batch.lengths.sum()) for batch in batches),
            self.stop.number,
        )
        lr = learning_rate(step, steps=config.steps, peak=config.lr, warmup=config.warmup, minimum=config.min_lr)
        set_learning_rate(self.optimizer, lr)
        seed_step(config.seed, step, group.rank)

        loss_sum, correct = 0.0, 0
        for part, batch in enumerate(batches):
            batch = batch.to(group.device)
            with group.backward_of(self.module, last=part == len(batches) - 1):
                with self._autocast():
                    loss, right = self.module(batch.input_ids, batch.answers)
                # Wrappers average gradients over processes; so this is the mean over all answers of the global batch.
                (loss * (group.world / answers)).backward()
            loss_sum, correct = loss_sum + loss.item(), correct + int(right or 0)
        loss_sum, correct_all = group.sum(loss_sum, correct)
        mean_loss = loss_sum / answers
        norm = self._clip()
        if not math.isfinite(mean_loss) or not math.isfinite(norm):
            self._stop_non_finite(mean_loss, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        counters.step += 1
        counters.examples += config.batch_size
        counters.tokens += int(tokens)
        counters.interval_steps += 1
        counters.interval_loss += mean_loss
        counters.interval_correct += int(correct_all)
        counters.interval_answers += int(answers)
        return {"loss": mean_loss, "gradient_norm": norm, "lr": lr, "stop": int(stop) and max(self.stop.number, 2)}

    def _autocast(self) -> AbstractContextManager[object]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.group.device.type, dtype=torch.bfloat16)

    def _clip(self) -> float:
        """The gradients' norm over all parameters, before they are clipped to the config's limit, if it has one."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = whole(norm) if hasattr(norm, "full_tensor") else norm
        if self.config.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.clip, norm)
        return float(norm)

    def _stop_non_finite(self, loss: float, norm: float) -> None:
        what = f"the loss became {loss}" if not math.isfinite(loss) else f"the gradient's norm became {norm}"
        good = (
            f"the last good checkpoint is step {self.saved_step}" if self.saved_step >= 0 else "nothing was saved yet"
        )
        raise Diverged(
            f"{what} at step {self.counters.step + 1}, so the run stopped before using it; {good};"
            " try a smaller --lr or --clip 1"
        )

    def _log_line(self, values: JsonObject) -> JsonObject:
        counters = self.counters
        no_tokens = self.config.objective == "layers"  # are predicted
        line = {
            "step": counters.step,
            "loss": counters.interval_loss / counters.interval_steps,
            "accuracy": None if no_tokens else counters.interval_correct / counters.interval_answers,
            "lr": values["lr"],
            "gradient_norm": values["gradient_norm"],
            "examples": counters.examples,
            "tokens": counters.tokens,
        }
        counters.interval_steps = counters.interval_correct = counters.interval_answers = 0
        counters.interval_loss = 0.0
        return line

    def _save(self) -> None:
        # Every process takes part in gathering; the main one alone writes.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        weights = {
            name: whole(value).contiguous() for name, value in self.model.state_dict().items() if name not in tied
        }
        updates = {name: weights[name] for name in self.parameters} if self.config.lora is not None else {}
        optimizer = optimizer_tensors(self.optimizer, self.parameters)

        def write_files(folder: Path) -> None:
            self.model.config.architectures = [self.architecture]
            self.model.config.save_pretrained(folder)
            if updates:
                save_file(updates, folder / UPDATES)
            save_file(merged(weights) if updates else weights, folder / "model.safetensors", metadata={"format": "pt"})
            save_file(optimizer, folder / "optimizer.safetensors")
            (folder / "state.json").write_text(json.dumps(asdict(self.counters)), encoding="utf-8")

        step = self.counters.step
        self.group.on_main(lambda: checkpoints.save(self.folder.checkpoints, step, write_files, self.config.keep))
        self.saved_step = step


def load_updates(model: nn.Module, file: Path) -> None:
    """What learned of a run with low-rank updates, beside the weights that the run started from."""
    saved = load_file(file)
    missing = [name for name, value in model.named_parameters() if value.requires_grad and name not in saved]
    _, unexpected = model.load_state_dict(saved, strict=False)
    if missing or unexpected:
        raise RunError(
            f"{file} does not fit the model ({[*missing, *unexpected][0]!r}); was it made by another version?"
        )


class _MetricsFile:
    """metrics.jsonl, open for appending in the main process."""

    def __init__(self, folder: RunFolder, writes: bool) -> None:
        self.folder, self.writes = folder, writes
        self.handle: TextIO | None = None

    def __enter__(self) -> _MetricsFile:
        if self.writes:
            self.handle = open(self.folder.metrics_file, "a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        if self.handle:
            with suppress(OSError):  # a full disk has already been reported
                self.handle.close()

    def write(self, line: JsonObject) -> None:
        self._guarded(lambda handle: (handle.write(json.dumps(line) + "\n"), handle.flush()))

    def sync(self) -> None:
        """Before a checkpoint: the lines up to it must be as durable as it is."""
        self._guarded(lambda handle: os.fsync(handle.fileno()))

    def _guarded(self, action: Callable[[TextIO], object]) -> None:
        if self.handle is None:
            return
        try:
            action(self.handle)
        except OSError as error:
            reason = full_reason(error)
            if reason is None:
                raise
            raise RunError(
                f"{reason}, so {self.folder.metrics_file} was not written; "
                f"{checkpoints.intact(self.folder.checkpoints)}; make room and resume"
            ) from error


def _require_tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "tensorboard is not installed; leave --tensorboard out, or: pip install 'traformer[tensorboard]'"
        ) from None
    return SummaryWriter


class _tensorboard:
    """Callable with a metrics line; does nothing unless the config asks for TensorBoard."""

    def __init__(self, folder: RunFolder, config: RunConfig, group: Parallel, step: int) -> None:
        self.writer = None
        if config.tensorboard and group.is_main:
            self.writer = _require_tensorboard()(str(folder.path / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> _tensorboard:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer:
            self.writer.close()

    def __call__(self, line: JsonObject) -> None:
        if self.writer:
            for name in ("loss", "accuracy", "lr", "gradient_norm"):
                if line[name] is None:
                    continue
                self.writer.add_scalar(name, line[name], line["step"])
