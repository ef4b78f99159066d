"""How a page looks: calm, at any width, and on paper."""

STYLE = """
:root{--ink:#1c2430;--soft:#4a5565;--line:#d5dbe3;--paper:#fbfcfd;--card:#fff;--good:#0b5d3b;
--good-back:#e8f4ee;--bad:#9b1c1c;--bad-back:#fdecec;--wait:#7a4a00;--wait-back:#fdf4e3;
--mark:#1f4e8c}
*{box-sizing:border-box}
html{font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;
color:var(--ink);background:var(--paper);-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:62rem;padding:1.5rem 1.25rem 4rem;overflow-wrap:anywhere}
h1{font-size:1.1rem;font-weight:600;margin:0 0 1rem;color:var(--soft)}
h2{font-size:1.35rem;line-height:1.3;margin:3rem 0 .5rem;padding-top:.75rem;
border-top:1px solid var(--line)}
h3{font-size:1.05rem;margin:1.75rem 0 .4rem}
p,ul,ol{margin:.5rem 0 .9rem}
li{margin:.25rem 0}
a{color:var(--mark)}
code{font:.88em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:#eef1f5;
padding:.1em .3em;border-radius:3px}
pre{background:#eef1f5;padding:.75rem;border-radius:6px;white-space:pre-wrap;margin:.5rem 0}
pre code{background:none;padding:0}
.lead{display:grid;grid-template-columns:minmax(0,1fr) 15rem;gap:1rem;align-items:stretch}
.box{border:1px solid var(--line);border-left:6px solid var(--soft);border-radius:6px;
background:var(--card);padding:1rem 1.25rem}
.box.good{border-left-color:var(--good);background:var(--good-back)}
.box.bad{border-left-color:var(--bad);background:var(--bad-back)}
.box.wait{border-left-color:var(--wait);background:var(--wait-back)}
#verdict{font-size:1.7rem;line-height:1.2;font-weight:700;margin:0 0 .5rem}
.good #verdict,.good .big{color:var(--good)}.bad #verdict,.bad .big{color:var(--bad)}
.wait .big{color:var(--wait)}
#claim{font-size:1.12rem;margin:0}
.whole{white-space:nowrap}
.big{font-size:1.25rem;font-weight:700;margin:0 0 .25rem;line-height:1.25}
.small,caption,figcaption,.note-text{font-size:.9rem;color:var(--soft)}
nav{margin:1.5rem 0}nav ol{columns:2;column-gap:2rem;padding-left:1.9rem;margin:.25rem 0}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;
padding:0;margin:1rem 0;list-style:none}
.numbers li{border:1px solid var(--line);border-radius:6px;background:var(--card);
padding:.6rem .8rem;margin:0}
.numbers b{display:block;font-size:1.3rem;line-height:1.2}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;background:var(--card);
margin:.75rem 0 1.25rem}
.scroll:focus-visible,a:focus-visible{outline:3px solid var(--mark);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.9rem;overflow-wrap:normal}
caption{text-align:left;padding:.6rem .75rem}
caption span{position:sticky;left:.75rem;display:inline-block;max-width:calc(100vw - 3.5rem)}
th,td{text-align:left;vertical-align:top;padding:.45rem .75rem;border-top:1px solid var(--line)}
th{font-weight:600;background:#f2f5f8}
tbody th{background:none}.plain tbody th,.rows tbody th{white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tr.party td,tr.party th{border-top:2px solid #aab4c2}
.cards td[data-label="What it means"]{min-width:12rem}
.cards td[data-label="What the attacker knows"]{min-width:8.5rem}
.rows td{white-space:nowrap}.rows td.wrap{white-space:normal;min-width:22rem}
.status{display:inline-block;font-weight:600;font-size:.82rem;padding:.1rem .5rem;
border-radius:4px;border:1px solid;white-space:nowrap}
.enforced,.PASS{color:var(--good);background:var(--good-back)}
.violated,.FAIL{color:var(--bad);background:var(--bad-back)}
.assumed,.INCONCLUSIVE{color:var(--wait);background:var(--wait-back)}
figure{margin:1.25rem 0;border:1px solid var(--line);border-radius:6px;background:var(--card);
padding:.75rem}
svg{display:block;width:100%;height:auto;max-width:42rem}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
svg .axis{fill:var(--soft)}svg .note{font-weight:600;fill:var(--bad)}
svg .grid{stroke:#e6eaef}svg .limit{stroke:var(--bad);stroke-width:2;stroke-dasharray:7 4}
svg .curve{fill:none;stroke:var(--bad);stroke-width:2;stroke-dasharray:7 4}
svg .chance{fill:none;stroke:#8993a1;stroke-dasharray:2 4}
svg .measured{fill:none;stroke:var(--mark);stroke-width:2}
svg .dots{fill:var(--mark)}svg .track{fill:#eef1f5}svg .bar{fill:#7fa3cf}
svg .interval{stroke:var(--ink);stroke-width:2;fill:none}
footer{margin-top:3rem;border-top:1px solid var(--line);padding-top:.75rem}
@media screen and (max-width:46rem){
html{font-size:15px}body{padding:1rem .8rem 3rem}
.lead{grid-template-columns:minmax(0,1fr)}nav ol{columns:1}
#verdict{font-size:1.4rem}#claim{font-size:1.02rem}
svg text{font-size:22px}
table.cards,table.cards tbody,table.cards tr,table.cards td,table.cards th,table.cards caption
{display:block;width:auto}
table.cards thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
table.cards tr{border-top:1px solid var(--line);padding:.5rem 0}
table.cards td[data-label]{min-width:0}
table.cards td,table.cards th{border:0;padding:.15rem .75rem;text-align:left;white-space:normal}
table.cards td[data-label]::before{content:attr(data-label) ": ";color:var(--soft);
font-weight:600}
}
@media print{
@page{margin:14mm}
html{font-size:10pt;background:#fff}body{max-width:none;padding:0}
.lead{grid-template-columns:minmax(0,1fr) 11rem;break-inside:avoid}
.box,.status{print-color-adjust:exact;-webkit-print-color-adjust:exact}
h2{break-after:avoid;margin-top:1.5rem}h3,caption{break-after:avoid}
figure,tr,.box,.numbers{break-inside:avoid}
.scroll{overflow:visible;border:0}
table{font-size:8pt}th,td{padding:.2rem .3rem}
table.rows{font-size:6.5pt}.cards td[data-label]{min-width:0}
.rows td,.rows td.wrap{white-space:normal;min-width:0;overflow-wrap:anywhere}
.rows td.n,.rows th{white-space:nowrap}.rows td.n{overflow-wrap:normal}
thead{display:table-header-group}
caption span{position:static;max-width:none}
a[href^="http"]::after{content:" (" attr(href) ")"}
nav a::after{content:""}
svg{max-width:13cm}
}
"""
