"""The page's style sheet: system fonts, light and dark, colours that stay apart for colour-blind readers."""

# The series colours are Okabe and Ito's, lightened where the ground is dark.
STYLE = """
:root{--ground:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d0d7de;--wash:#f6f8fa;--beyond:#f3efe6;--bar:#0072b222;
--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#b0578d;--s4:#7a6a00;--s5:#555}
@media (prefers-color-scheme:dark){:root{--ground:#0f1419;--ink:#e6e9ec;--soft:#9aa4ae;--rule:#323a43;--wash:#182028;
--beyond:#1d2229;--bar:#56b4e933;--s0:#56b4e9;--s1:#ff9a4d;--s2:#3ecf9f;--s3:#e08fc0;--s4:#e0cf4f;--s5:#bbb}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1320px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 12px}
h2{font-size:1.25rem;margin:36px 0 4px}
h3{font-size:1rem;margin:20px 0 0}
.sub{color:var(--soft);margin:2px 0 10px;font-size:.92rem}
.findings{padding-left:20px;margin:0 0 18px}
.legend{display:flex;flex-wrap:wrap;gap:8px 24px;margin:0}
.legend-item{display:inline-flex;align-items:center;gap:8px;font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:16px;margin:8px 0 16px}
.plot{width:100%;height:auto;background:var(--ground);border:1px solid var(--rule);border-radius:8px;padding:6px}
.plots>.plot:only-child{grid-column:1/-1;max-width:680px}
.plot text{fill:var(--ink);font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.plot .plot-title{font-size:14px;font-weight:650}
.plot .tick,.plot .axis-title,.plot .note{fill:var(--soft);font-size:11px}
.grid{stroke:var(--rule);stroke-width:1;opacity:.7}
.axis{stroke:var(--soft);stroke-width:1}
.beyond{fill:var(--beyond)}
.trained{stroke:var(--ink);stroke-width:1.6}
.chance{fill:none;stroke:var(--soft);stroke-width:1.2;stroke-dasharray:1 4;stroke-linecap:round}
.line{fill:none;stroke:currentColor;stroke-width:2.4;stroke-linejoin:round}
.interval{stroke:currentColor;stroke-width:5;opacity:.28;stroke-linecap:round}
.marker{fill:currentColor;stroke:var(--ground);stroke-width:1.2}
.marker.open{fill:none;stroke:currentColor;stroke-width:2.2}
.plot .label{fill:currentColor;font-weight:650;font-size:12.5px}
.s0{color:var(--s0)}.s1{color:var(--s1)}.s2{color:var(--s2)}.s3{color:var(--s3)}.s4{color:var(--s4)}.s5{color:var(--s5)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.93rem;min-width:420px}
th,td{padding:4px 14px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{font-weight:650}
.beyond-row{background:var(--beyond)}
td.share{background:linear-gradient(var(--bar),var(--bar)) no-repeat 0 0/var(--share) 100%;background-clip:padding-box;
border-left:8px solid transparent;min-width:150px}
small{color:var(--soft)}
pre{background:var(--wash);border:1px solid var(--rule);border-radius:6px;padding:10px 12px;margin:4px 0 0;
overflow-x:auto;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
@media print{.plot,pre{break-inside:avoid}}
"""
