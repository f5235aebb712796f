"""One look for the page, its figures as files, and the docs: colours, markers, dashes, and the page's style sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from traformer.methods import ABLATION, EXTENSION, LEFT_OUT, METHODS, TRA

# After Okabe and Ito's colours, which colour-blind readers can tell apart: darkened until text in them has a contrast
# of 4.5 to 1 on a light ground, and lightened for a dark one.
LIGHT = ("#0072b2", "#bf5300", "#00795a", "#a3477f", "#7a6a00", "#555555")
DARK = ("#56b4e9", "#ff9a4d", "#3ecf9f", "#e08fc0", "#e0cf4f", "#bbbbbb")
# Markers and dashes tell the series apart where colours do not.
MARKERS = ("circle", "square", "triangle", "diamond", "cross")
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 4), (2, 4), (10, 4, 2, 4), (4, 3, 1, 3))


def marker(style: int) -> str:
    """Of a series; `style` numbers them over a whole report."""
    return MARKERS[style % len(MARKERS)]


def dash(style: int) -> tuple[float, ...]:
    """Lengths of strokes and gaps; empty for a whole line."""
    return DASHES[style % len(DASHES)]


def family_style(attention: str) -> int:
    """Where each of many methods has a panel of its own: one look for TRA's family and one for all others."""
    return 0 if attention in METHODS and METHODS[attention].kind in (TRA, ABLATION, EXTENSION, LEFT_OUT) else 1


def _palette(colours: tuple[str, ...]) -> dict[str, str]:
    return {f"s{number}": value for number, value in enumerate(colours)}


LIGHT_THEME = {
    "ground": "#ffffff", "ink": "#1b1f24", "soft": "#57606a", "rule": "#d0d7de", "wash": "#f6f8fa", "beyond": "#f3efe6",
    "bar": "#0072b222", "good": "#116329", "bad": "#a40e26", "link": "#0550ae", **_palette(LIGHT),
}  # fmt: skip
DARK_THEME = {
    "ground": "#0f1419", "ink": "#e6e9ec", "soft": "#9aa4ae", "rule": "#323a43", "wash": "#182028", "beyond": "#1d2229",
    "bar": "#56b4e933", "good": "#7ee2a8", "bad": "#ff9a9a", "link": "#79b8ff", **_palette(DARK),
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """How elements of a class are drawn, in the page's SVG and in PNG files alike.

    Colours are names of a theme, or "own" for the colour of the series.
    """

    fill: str | None = None
    stroke: str | None = None
    width: float = 1.0
    opacity: float = 1.0
    dash: tuple[float, ...] = ()
    round_ends: bool = False
    size: float = 12.0  # of text, in pixels
    bold: bool = False


# By class; of an element with several, the last one that is listed here.
TEXT_LOOKS = {
    "": Look(fill="ink"),
    "plot-title": Look(fill="ink", size=14, bold=True),
    "tick": Look(fill="soft", size=11),
    "axis-title": Look(fill="soft", size=11),
    "note": Look(fill="soft", size=11),
    "label": Look(fill="own", stroke="ground", width=3, size=12.5, bold=True),  # the stroke is a rim behind it
}
SHAPE_LOOKS = {
    "grid": Look(stroke="rule", opacity=0.7),
    "axis": Look(stroke="soft"),
    "beyond": Look(fill="beyond"),
    "trained": Look(stroke="ink", width=1.6),
    "chance": Look(stroke="soft", width=1.6, dash=(1, 4), round_ends=True),
    "others": Look(stroke="rule"),
    "line": Look(stroke="own", width=2.4, round_ends=True),
    "band": Look(fill="own", opacity=0.13),
    "interval": Look(stroke="own", width=5, opacity=0.28, round_ends=True),
    "marker": Look(fill="own", stroke="ground", width=1.2),
    "open": Look(stroke="own", width=2.2),
    "bound": Look(fill="ground", stroke="own", width=1.8),
}


def variables(theme: Mapping[str, str]) -> str:
    """A theme as CSS."""
    return ";".join(f"--{name}:{value}" for name, value in theme.items())


def _css(look: Look) -> str:
    def paint(name: str | None) -> str:
        return "none" if name is None else "currentColor" if name == "own" else f"var(--{name})"

    parts = [f"fill:{paint(look.fill)}", f"stroke:{paint(look.stroke)}"]
    parts += [f"stroke-width:{look.width:g}"] if look.stroke else []
    parts += [f"opacity:{look.opacity:g}"] if look.opacity != 1 else []
    parts += ["stroke-dasharray:" + " ".join(f"{length:g}" for length in look.dash)] if look.dash else []
    parts += ["stroke-linejoin:round"] if look.round_ends else []
    parts += ["stroke-linecap:round"] if look.round_ends and look.dash else []
    return ";".join(parts)


def _text_css(look: Look) -> str:
    weight = 650 if look.bold else 400
    behind = ";paint-order:stroke;stroke-linejoin:round" if look.stroke else ""
    return f'{_css(look)}{behind};font:{weight} {look.size:g}px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif'


# Of the plots alone: in the page and within each SVG file.
PLOT_STYLE = "\n".join(
    [
        *(f".{name}{{{_css(look)}}}" for name, look in SHAPE_LOOKS.items()),
        *(f".plot {f'.{name}' if name else 'text'}{{{_text_css(look)}}}" for name, look in TEXT_LOOKS.items()),
        *(f".s{number}{{color:var(--s{number})}}" for number in range(len(LIGHT))),
    ]
)

# Of every page: the theme's colours as variables, and the ground.
THEME_STYLE = (
    f":root{{{variables(LIGHT_THEME)}}}\n@media (prefers-color-scheme:dark){{:root{{{variables(DARK_THEME)}}}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1,h2,h3,p,li,figcaption{overflow-wrap:anywhere}
"""
)

# Of the report.
PAGE_STYLE = (
    THEME_STYLE
    + """
main{max-width:1320px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 12px}
h2{font-size:1.25rem;margin:40px 0 4px}
h3{font-size:1rem;margin:20px 0 0}
a{color:var(--link)}
.sub{color:var(--soft);margin:2px 0 10px;font-size:.92rem}
.findings{padding-left:20px;margin:0 0 18px}
.legend{display:flex;flex-wrap:wrap;gap:8px 24px;margin:0}
.legend-item{display:inline-flex;align-items:center;gap:8px;font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:16px;margin:8px 0 16px}
figure{margin:0;min-width:0}
figure.wide{grid-column:1/-1}
figcaption{font-size:.85rem;color:var(--soft);margin:4px 2px 0;display:flex;flex-wrap:wrap;gap:2px 14px}
.downloads{white-space:nowrap}
.downloads a{margin-right:10px}
.plot{width:100%;height:auto;background:var(--ground);border:1px solid var(--rule);border-radius:8px;padding:6px}
.plots>figure:only-child:not(.wide){grid-column:1/-1;max-width:520px}
.series>g:hover .marker{stroke:var(--ink)}
.series:hover>.line{stroke-width:3.6}
details{margin:10px 0}
summary{cursor:pointer;font-weight:600}
.scroll{overflow-x:auto}
.wide .plot{min-width:840px}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:3px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.93rem;min-width:420px;margin:0 0 14px}
caption{text-align:left;font-weight:600;padding:6px 0 2px}
th,td{padding:4px 14px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{font-weight:650}
th:first-child,td:first-child{position:sticky;left:0;background:var(--ground)}
.beyond-row td:first-child{background:var(--beyond)}
tbody tr:hover td{border-bottom-color:var(--soft)}
.beyond-row{background:var(--beyond)}
td.share{background:linear-gradient(var(--bar),var(--bar)) no-repeat 0 0/var(--share) 100%;background-clip:padding-box;
border-left:8px solid transparent;min-width:150px}
.verdicts td{text-align:left;white-space:normal}
.verdicts td:last-child{color:var(--soft)}
.outcome{font-weight:650;white-space:nowrap!important}
.holds{color:var(--good)}.does-not-hold{color:var(--bad)}
small{color:var(--soft)}
pre{background:var(--wash);border:1px solid var(--rule);border-radius:6px;padding:10px 12px;margin:4px 0 0;
overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
@media (max-width:600px){main{padding:20px 14px 48px}th,td{padding:4px 8px}}
@media print{main{max-width:none;padding:0}figure,pre,tr{break-inside:avoid}h2,h3,caption{break-after:avoid}
.downloads{display:none}}
"""
    + PLOT_STYLE
)
