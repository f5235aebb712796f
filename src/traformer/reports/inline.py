"""Pages in notebooks: an object whose cell shows the whole page, shut off from the notebook around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from traformer.storage import write_atomically

HEIGHT = 820  # pixels of the frame


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page. As the last value of a notebook's cell it is shown there; `save` writes it."""

    title: str
    html: str = field(repr=False)
    height: int = HEIGHT

    def save(self, path: str | Path) -> Path:
        """Write the page to a file that opens in any browser."""
        path = Path(path)
        write_atomically(path, self.html)
        return path

    def _repr_html_(self) -> str:
        # The sandbox gives the page an origin of its own: its script draws, and cannot reach the notebook.
        return (
            f'<iframe title="{escape(self.title)}" sandbox="allow-scripts" srcdoc="{escape(self.html)}" '
            f'style="width:100%;height:{self.height}px;border:0" loading="lazy"></iframe>'
        )
