"""One look for the page, its figures as files, and the docs: colours, markers, dashes, and the page's style sheet."""

from __future__ import annotations

# Okabe and Ito's colours, which colour-blind readers can tell apart, and the same lightened for a dark ground.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#7a6a00", "#555555")
DARK = ("#56b4e9", "#ff9a4d", "#3ecf9f", "#e08fc0", "#e0cf4f", "#bbbbbb")
# Markers and dashes tell the series apart where colours do not.
MARKERS = ("circle", "square", "triangle", "diamond", "cross")
MATPLOTLIB_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "cross": "x"}
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 4), (2, 4), (10, 4, 2, 4), (4, 3, 1, 3))


def colour(style: int) -> str:
    """On a light ground; `style` numbers a series over a whole report."""
    return LIGHT[style % len(LIGHT)]


def marker(style: int) -> str:
    return MARKERS[style % len(MARKERS)]


def dash(style: int) -> tuple[float, ...]:
    """Lengths of strokes and gaps; empty for a whole line."""
    return DASHES[style % len(DASHES)]


def _palette(colours: tuple[str, ...]) -> str:
    return ";".join(f"--s{number}:{value}" for number, value in enumerate(colours))


LIGHT_THEME = (
    "--ground:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d0d7de;--wash:#f6f8fa;--beyond:#f3efe6;--bar:#0072b222;"
    "--good:#116329;--bad:#a40e26;--link:#0550ae;" + _palette(LIGHT)
)
DARK_THEME = (
    "--ground:#0f1419;--ink:#e6e9ec;--soft:#9aa4ae;--rule:#323a43;--wash:#182028;--beyond:#1d2229;--bar:#56b4e933;"
    "--good:#7ee2a8;--bad:#ff9a9a;--link:#79b8ff;" + _palette(DARK)
)

# Of the plots alone: in the page and within each SVG file.
PLOT_STYLE = """
.plot text{fill:var(--ink);font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.plot .plot-title{font-size:14px;font-weight:650}
.plot .tick,.plot .axis-title,.plot .note{fill:var(--soft);font-size:11px}
.grid{stroke:var(--rule);stroke-width:1;opacity:.7}
.axis{stroke:var(--soft);stroke-width:1}
.beyond{fill:var(--beyond)}
.trained{stroke:var(--ink);stroke-width:1.6}
.chance{fill:none;stroke:var(--soft);stroke-width:1.6;stroke-dasharray:1 4;stroke-linecap:round}
.others{fill:none;stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke:currentColor;stroke-width:2.4;stroke-linejoin:round}
.band{fill:currentColor;opacity:.16;stroke:none}
.interval{stroke:currentColor;stroke-width:5;opacity:.28;stroke-linecap:round}
.marker{fill:currentColor;stroke:var(--ground);stroke-width:1.2}
.marker.open{fill:none;stroke:currentColor;stroke-width:2.2}
.marker.bound{fill:var(--ground);stroke:currentColor;stroke-width:1.8}
.plot .label{fill:currentColor;font-weight:650;font-size:12.5px}
.s0{color:var(--s0)}.s1{color:var(--s1)}.s2{color:var(--s2)}.s3{color:var(--s3)}.s4{color:var(--s4)}.s5{color:var(--s5)}
"""

PAGE_STYLE = (
    f":root{{{LIGHT_THEME}}}\n@media (prefers-color-scheme:dark){{:root{{{DARK_THEME}}}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
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
.plot{width:100%;height:auto;background:var(--ground);border:1px solid var(--rule);border-radius:8px;padding:6px}
.plots>figure:only-child:not(.wide){grid-column:1/-1;max-width:680px}
details{margin:10px 0}
summary{cursor:pointer;font-weight:600}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.93rem;min-width:420px;margin:0 0 14px}
caption{text-align:left;font-weight:600;padding:6px 0 2px}
th,td{padding:4px 14px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{font-weight:650}
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
@media print{.plot,pre{break-inside:avoid}}
"""
    + PLOT_STYLE
)
