"""How a report looks: one column of quiet text, pictures two abreast, light or dark as the reader has it."""

STYLESHEET = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  --paper: #fcfcfb; --card: #ffffff; --ink: #1f2429; --muted: #5f6874; --soft: #99a1ab; --faint: #e3e6ea;
  --accent: #b9420e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181b; --card: #1b1f23; --ink: #e7eaed; --muted: #a3acb6; --soft: #7d8792; --faint: #2e343a;
    --accent: #f08a4b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 var(--font); font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
h1 { font-size: 1.75rem; line-height: 1.2; font-weight: 600; letter-spacing: -0.015em; margin: 0 0 0.35rem; }
h2 { font-size: 1.15rem; font-weight: 600; margin: 3.25rem 0 0.9rem; letter-spacing: -0.005em; }
h3 { font-size: 0.95rem; font-weight: 600; margin: 0 0 0.15rem; }
p { margin: 0 0 0.6rem; max-width: 44rem; }
a { color: var(--accent); }
.lead, figcaption, .quiet { color: var(--muted); }
.lead { margin: 0; }
figcaption, .quiet, .notes { font-size: 0.875rem; }
.keys {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: 1.5rem; margin: 2.25rem 0 0;
}
.keys div { border-top: 1px solid var(--faint); padding-top: 0.6rem; }
.keys dt { font-size: 0.8125rem; color: var(--muted); }
.keys dd { margin: 0; font-size: 1.55rem; line-height: 1.25; font-weight: 550; letter-spacing: -0.02em; }
.keys dd small { display: block; font-size: 0.8125rem; font-weight: 400; letter-spacing: 0; color: var(--muted); }
.keys .first dd { color: var(--accent); }
.notes { border-left: 3px solid var(--accent); padding: 0.1rem 0 0.1rem 1rem; margin: 2rem 0 0; list-style: none; }
.notes li { margin: 0.2rem 0; max-width: 44rem; }
.pictures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 2.25rem 2.5rem;
}
figure { margin: 0; min-width: 0; }
figcaption { margin: 0 0 0.6rem; min-height: 2.6em; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg * { stroke-linejoin: round; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; }
caption { text-align: left; color: var(--muted); padding: 0 0 0.4rem; }
th { font-weight: 500; color: var(--muted); text-align: right; vertical-align: bottom; }
th, td { padding: 0.4rem 0 0.4rem 1.25rem; border-bottom: 1px solid var(--faint); white-space: nowrap; }
td { text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody th { color: var(--ink); font-weight: 400; }
table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.facts th { color: var(--muted); vertical-align: top; width: 7rem; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 2rem 2.5rem; }
section > * + .scroll, section > .scroll + *, section > .pictures + * { margin-top: 1.75rem; }
.good { color: var(--accent); font-weight: 550; }
pre {
  font: 0.8125rem/1.55 var(--mono); margin: 0 0 1.75rem; padding: 0.9rem 1rem; background: var(--card);
  border: 1px solid var(--faint); border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere;
}
@media (max-width: 32rem) {
  body { padding-top: 1.5rem; }
  .keys { grid-template-columns: 1fr 1fr; gap: 1.1rem 1rem; margin-top: 1.5rem; }
  .keys dd { font-size: 1.3rem; }
  figcaption { min-height: 0; }
}
@media print {
  :root { color-scheme: light; --paper: #ffffff; }
  body { max-width: none; padding: 0; }
  figure, table, .keys { break-inside: avoid; }
}
"""
