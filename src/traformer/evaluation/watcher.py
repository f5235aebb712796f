"""What an evaluation reports while it runs. Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traformer.tasks.base import Split


class Watcher:
    """Ignores everything; the command line has one that shows it."""

    def start(self, total_tokens: int) -> None: ...

    def advance(self, split: Split, tokens: int) -> None: ...

    def say(self, text: str) -> None: ...
