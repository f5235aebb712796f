"""The page of `tra explore`: one HTML file that needs no network, with the exploration inside it as JSON."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from traformer.reports.explore.growth import growth_section
from traformer.reports.inline import Page
from traformer.reports.style import PLOT_STYLE, THEME_STYLE

if TYPE_CHECKING:
    from traformer.evaluation.exploration import Exploration

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#runs">Skip to the models</a>
<main>
<h1>{title}</h1>
<p class="sub">Choose a query: click a token or use the arrow keys. A key's colour is its weight. Keys that the head
removes from the softmax are struck out; distance then counts only the keys that remain.</p>
<div class="controls">
<label>Length <input id="length" type="range" min="0" max="0" step="1" value="0">
<output id="length-text" for="length"></output></label>
<span class="sub"><kbd>←</kbd> <kbd>→</kbd> query &nbsp; <kbd>↑</kbd> <kbd>↓</kbd> head &nbsp;
<kbd>[</kbd> <kbd>]</kbd> length</span>
</div>
{growth}
<div class="key"><span>weight 0 <span class="scale"></span> 100 %</span>
<span>border: the query</span><span>dashed border: a key that decides the answer</span>
<span><s>struck out</s>: removed</span><span>underlined: within the gate's reach</span>
<span>✓ ✗: predicted right or wrong</span></div>
<div id="runs" class="runs"></div>
<noscript>This page draws with JavaScript, which is switched off here.</noscript>
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def explore_page(exploration: Exploration) -> Page:
    """The page, to be saved or shown in a notebook."""
    data = json.dumps(exploration.to_dict(), separators=(",", ":"))
    folder = files(__package__)
    html = _PAGE.format(
        title=escape(exploration.title),
        growth=growth_section(exploration),
        style=THEME_STYLE + PLOT_STYLE + (folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        data=data.replace("<", "\\u003c"),  # so that no token can end the script element
    )
    return Page(exploration.title, html)
