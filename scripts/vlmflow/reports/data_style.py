"""How the data page looks, in light and in dark."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5c6775; --line: #dfe3e8;
  --train: #2f6fd0; --val: #11a08c; --test: #e08a1e; --lost: #c8404f; --kept: #2f6fd0; --row: #c8404f;
  --picture: #e08a1e; --again: #8d97a5; --quiet: #eef1f5 }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --ink: #e6eaf0; --soft: #9aa6b5;
  --line: #303945; --train: #6aa2f5; --val: #3fcab4; --test: #f0a94b; --lost: #f07582; --kept: #6aa2f5; --row: #f07582;
  --picture: #f0a94b; --again: #7b8696; --quiet: #242c37 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1160px; margin: 0 auto; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .25rem } h3 { font-size: 1rem; margin: 0 0 .25rem }
p { margin: .25rem 0 1rem; max-width: 46rem } .soft { color: var(--soft) } .small { font-size: .85rem }
nav a, th a { color: inherit } nav a { color: var(--soft); margin-right: 1rem } nav a:hover { color: var(--ink) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.15rem;
  min-width: 0 }
.tiles, .charts, .sheet, .pairs { display: grid; gap: 1rem; margin: 1rem 0 }
.tiles { grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)) }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)) }
.sheet { grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); align-items: start }
.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)) }
.tile b { display: block; font-size: 1.65rem; line-height: 1.25; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .7rem .35rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--soft); font-size: .85rem } tr:last-child > * { border-bottom: 0 }
tbody th { color: var(--ink); font-size: inherit; font-weight: 500 } .n { text-align: right; white-space: nowrap }
.detail { overflow-wrap: anywhere }
code, .text { font: .82rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }
.track { display: flex; gap: 2px; height: 1.5rem; border-radius: 5px; overflow: hidden; background: var(--quiet);
  margin: .35rem 0 }
.track i, .bar i { display: block; height: 100%; min-width: 2px }
.bar { display: flex; height: .7rem; margin-top: .4rem; min-width: 90px; border-radius: 3px; overflow: hidden;
  background: var(--quiet) }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; list-style: none; padding: 0; margin: .35rem 0 0;
  font-size: .85rem; color: var(--soft) }
.key i, .dot { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .4em }
.plot { display: flex; align-items: stretch; height: 190px; margin-top: .75rem; border-bottom: 1px solid var(--soft);
  background: linear-gradient(var(--line) 1px, transparent 1px) top / 100% 25% }
.bin { flex: 1 1 0; display: flex; align-items: flex-end; justify-content: center; gap: 1px; padding: 0 4px;
  min-width: 0 }
.bin i { flex: 0 1 30px; min-width: 1px; border-radius: 3px 3px 0 0 } .bin i.some { min-height: 2px }
.labels { display: flex; color: var(--soft); font-size: .75rem; line-height: 1.2; margin-top: .3rem }
.labels span { flex: 1 1 0; text-align: center; min-width: 0 } .labels.many span { font-size: .66rem }
.unit { text-align: center; color: var(--soft); font-size: .8rem }
.train { background: var(--train) } .val { background: var(--val) } .test { background: var(--test) }
.kept { background: var(--kept) } .row { background: var(--row) } .picture { background: var(--picture) }
.again { background: var(--again) } .unasked { background: var(--line) }
figure { margin: 0 } figcaption { display: flex; justify-content: space-between; gap: 1rem }
details { margin-top: .6rem; font-size: .85rem } summary { cursor: pointer; color: var(--soft) }
.sample { padding: 0; overflow: hidden } .sample > div { padding: .8rem 1rem 1rem }
.shot { display: flex; align-items: center; justify-content: center; background: var(--quiet); height: 210px }
.shot img { max-width: 100%; max-height: 210px; display: block }
.shot.half { height: 150px } .shot.half img { max-height: 150px }
.sample > .two { display: grid; grid-template-columns: 1fr 1fr; gap: 2px; padding: 0 }
.turn { margin: .6rem 0 0; padding: .45rem .7rem; border-radius: 8px; background: var(--quiet); font-size: .88rem;
  white-space: pre-wrap; overflow-wrap: anywhere }
.small code { word-break: break-all }
.turn.gpt { background: transparent; border: 1px solid var(--line) }
.turn b { display: block; font-size: .72rem; color: var(--soft); font-weight: 600 }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; font-size: .8rem;
  color: var(--soft); overflow-wrap: anywhere }
.gap { margin-top: 1.5rem } .reason { margin-bottom: 1rem } .bars { width: 22% } .bars.wide { width: 45% }
.reject { border-top: 1px solid var(--line); padding: .6rem 0 } .reject:first-of-type { border-top: 0 }
"""
