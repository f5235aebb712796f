"""PNG files against the SVG they are made from: colours at the places where the elements are."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.image import imread

from traformer.reports.png import save_png
from traformer.reports.style import LIGHT, LIGHT_THEME, SHAPE_LOOKS, TEXT_LOOKS

SVG = """<svg class="plot" viewBox="0 0 100 60">
<defs><g id="behind"><rect class="beyond" x="0" y="0" width="20" height="20"/></g></defs>
<g transform="translate(60,30)"><use href="#behind"/></g>
<g class="series s1"><line class="line" x1="10" x2="50" y1="50" y2="50"/>
<polyline class="line" points="10,10 50,10" stroke-dasharray="4 4"/>
<g><circle class="marker" cx="30" cy="30" r="6"/><title>not drawn</title></g>
<path class="marker open" d="M80 5 l8 8 m0 -8 l-8 8"/><polygon class="band" points="5,40 15,40 15,45 5,45"/>
<text class="label" x="60" y="25" text-anchor="end">word</text></g></svg>"""


def colour(text: str) -> np.ndarray:
    return np.array([int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)])


@pytest.fixture
def picture(tmp_path):
    save_png(SVG, tmp_path / "x.png", scale=4)
    return imread(tmp_path / "x.png")[..., :3]


def test_elements_are_where_the_svg_has_them(picture):
    assert picture.shape == (240, 400, 3)

    def at(x, y):
        return picture[round(4 * y), round(4 * x)]

    own, ground = colour(LIGHT[1]), colour(LIGHT_THEME["ground"])
    for place in ((30, 50), (30, 30), (84, 9)):
        assert at(*place) == pytest.approx(own, abs=0.02), place
    for place in ((2, 2), (10, 40), (70, 35)):
        assert not np.allclose(at(*place), own, atol=0.02)
    assert at(2, 2) == pytest.approx(ground) and at(70, 40) == pytest.approx(colour(LIGHT_THEME["beyond"]), abs=0.01)
    seen = SHAPE_LOOKS["band"].opacity
    assert at(10, 42) == pytest.approx((1 - seen) * ground + seen * own, abs=0.02)
    dashed = [np.allclose(at(x, 10), own, atol=0.05) for x in np.arange(12, 48, 0.5)]
    assert any(dashed) and not all(dashed)


def test_looks_are_colours_of_both_themes():
    for look in [*TEXT_LOOKS.values(), *SHAPE_LOOKS.values()]:
        assert {look.fill, look.stroke} - {None, "own"} <= set(LIGHT_THEME)
