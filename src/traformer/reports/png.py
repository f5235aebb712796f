"""SVG figures as PNG files, drawn with matplotlib from the same elements and the same looks as on the page.

It knows what `svg` writes and no more: groups, lines, shapes and texts with the classes of `style`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from traformer.reports.style import LIGHT_THEME, SHAPE_LOOKS, TEXT_LOOKS, Look

SCALE = 2.0  # pixels of the file per unit of the SVG
_DPI = 100
_POINTS = 72 / _DPI  # per pixel


def save_png(svg: str, file: Path, scale: float = SCALE) -> None:
    """Write an SVG of a report as PNG on a light ground."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    picture = Figure(figsize=(width * scale / _DPI, height * scale / _DPI), dpi=_DPI, facecolor=LIGHT_THEME["ground"])
    FigureCanvasAgg(picture)
    _Painter(picture, root, height, scale).paint_all(root, 0.0, 0.0, "")
    picture.savefig(file)


class _Painter:
    """Walks through the elements; coordinates of the SVG become pixels, whose y axis points up."""

    def __init__(self, picture: Any, root: ElementTree.Element, height: float, scale: float) -> None:
        self.picture, self.height, self.scale = picture, height, scale
        self.named = {element.attrib["id"]: element for element in root.iter() if "id" in element.attrib}
        self.order = 0

    def paint_all(self, parent: ElementTree.Element, dx: float, dy: float, own: str) -> None:
        for element in parent:
            self.paint(element, dx, dy, own)

    def paint(self, element: ElementTree.Element, dx: float, dy: float, own: str) -> None:
        """One element, moved by (dx, dy); `own` is the colour of the series it belongs to."""
        classes = element.attrib.get("class", "").split()
        if element.tag == "g":
            if moved := re.match(r"translate\(([-\d.]+),([-\d.]+)\)", element.attrib.get("transform", "")):
                dx, dy = dx + float(moved[1]), dy + float(moved[2])
            self.paint_all(element, dx, dy, next((LIGHT_THEME[name] for name in classes if name in LIGHT_THEME), own))
        elif element.tag == "use":
            self.paint_all(self.named[element.attrib["href"].removeprefix("#")], dx, dy, own)
        elif element.tag == "text":
            look = next((TEXT_LOOKS[name] for name in classes if name in TEXT_LOOKS), TEXT_LOOKS[""])
            self._text(element, look, dx, dy, own)
        elif element.tag in _SHAPES:
            look = [SHAPE_LOOKS[name] for name in classes if name in SHAPE_LOOKS][-1]
            self._shape(element, look, dx, dy, own)

    def _pixels(self, x: float, y: float) -> tuple[float, float]:
        return x * self.scale, (self.height - y) * self.scale

    def _text(self, element: ElementTree.Element, look: Look, dx: float, dy: float, own: str) -> None:
        from matplotlib.patheffects import withStroke
        from matplotlib.text import Text

        x, y = self._pixels(float(element.attrib["x"]) + dx, float(element.attrib["y"]) + dy)
        anchor = {"end": "right", "middle": "center"}.get(element.attrib.get("text-anchor", ""), "left")
        text = Text(
            x, y, element.text or "", color=_colour(look.fill, own), fontsize=look.size * self.scale * _POINTS,
            fontweight="bold" if look.bold else "normal", ha=anchor, va="baseline", parse_math=False,
        )  # fmt: skip
        if look.stroke:
            rim = withStroke(linewidth=look.width * self.scale * _POINTS, foreground=_colour(look.stroke, own))
            text.set_path_effects([rim])
        self._add(text)

    def _shape(self, element: ElementTree.Element, look: Look, dx: float, dy: float, own: str) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Polygon

        given = tuple(float(length) for length in element.attrib.get("stroke-dasharray", "").split())
        width = look.width * self.scale * _POINTS
        for points, is_closed in _SHAPES[element.tag](element.attrib):
            places = [self._pixels(x + dx, y + dy) for x, y in points]
            if is_closed:
                fill, stroke = _colour(look.fill, own), _colour(look.stroke, own)
                self._add(
                    Polygon(
                        places,
                        closed=True,
                        facecolor=fill or "none",
                        edgecolor=stroke or "none",
                        alpha=look.opacity,
                        linewidth=width if stroke else 0.0,
                    )
                )
                continue
            line = Line2D(
                [x for x, _ in places], [y for _, y in places], color=_colour(look.stroke, own), linewidth=width,
                alpha=look.opacity, solid_capstyle="round" if look.round_ends else "butt", solid_joinstyle="round",
            )  # fmt: skip
            strokes = given or look.dash
            if strokes:
                line.set_dashes([length / look.width for length in strokes])  # matplotlib counts in line widths
                line.set_dash_capstyle("round" if look.dash else "butt")
            self._add(line)

    def _add(self, artist: Any) -> None:
        from matplotlib.transforms import IdentityTransform

        artist.set_transform(IdentityTransform())
        self.order += 1
        artist.set_zorder(self.order)
        self.picture.add_artist(artist)


def _colour(name: str | None, own: str) -> str | None:
    return None if name is None else own if name == "own" else LIGHT_THEME[name]


# Element -> its outlines: points, and whether they enclose an area --------------------------------------------------

Outline = tuple[list[tuple[float, float]], bool]


def _pairs(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())]


def _line(attributes: dict[str, str]) -> list[Outline]:
    x1, x2, y1, y2 = (float(attributes[name]) for name in ("x1", "x2", "y1", "y2"))
    return [([(x1, y1), (x2, y2)], False)]


def _rect(attributes: dict[str, str]) -> list[Outline]:
    x, y, width, height = (float(attributes[name]) for name in ("x", "y", "width", "height"))
    return [([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], True)]


def _circle(attributes: dict[str, str]) -> list[Outline]:
    import math

    x, y, r = (float(attributes[name]) for name in ("cx", "cy", "r"))
    turns = [2 * math.pi * step / 24 for step in range(24)]
    return [([(x + r * math.cos(turn), y + r * math.sin(turn)) for turn in turns], True)]


def _path(attributes: dict[str, str]) -> list[Outline]:
    """Moves and lines: M is absolute, l and m are relative."""
    outlines: list[Outline] = []
    x = y = 0.0
    for command, arguments in re.findall(r"([Mml])([^Mml]*)", attributes["d"]):
        a, b = map(float, arguments.split())
        before = (x, y)
        x, y = (a, b) if command == "M" else (x + a, y + b)
        if command == "l":
            outlines.append(([before, (x, y)], False))
    return outlines


_SHAPES = {
    "line": _line,
    "rect": _rect,
    "circle": _circle,
    "path": _path,
    "polyline": lambda attributes: [(_pairs(attributes["points"]), False)],
    "polygon": lambda attributes: [(_pairs(attributes["points"]), True)],
}
