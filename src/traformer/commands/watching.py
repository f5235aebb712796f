"""What the commands that measure a run say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traformer.evaluation.watcher import Watcher
from traformer.runs.folder import RunFolder
from traformer.terminal import ProgressBar, say

if TYPE_CHECKING:
    from traformer.tasks.base import Split


def announce(path: str, step: int | None = None) -> None:
    """Say which run is measured, or refuse what is no run with a checkpoint: at once, before torch is loaded."""
    folder = RunFolder.open(path)
    config = folder.read_config()
    say(f"{path}: {config.task}, {config.attention}, step {folder.step_to_use(step)}")


class ShownWatcher(Watcher):
    """A bar on a terminal, one line per split in a pipe. Use as a context manager."""

    def __init__(self) -> None:
        self.bar = ProgressBar()
        self.seen: set[str] = set()

    def __enter__(self) -> ShownWatcher:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    def start(self, total_tokens: int) -> None:
        self.bar.start("", total_tokens)

    def advance(self, split: Split, tokens: int) -> None:
        name = f"{split.name} {split.length}"
        self.bar.update(advance=tokens, title=name)
        if not self.bar.is_live and name not in self.seen:
            self.seen.add(name)
            self.say(f"measuring {name}")

    def say(self, text: str) -> None:
        self.bar.say(text)
