"""One self-contained HTML page: sections in, text out. No script, no font, nothing fetched.

    Section(Chart | Table | Strip | sentence) -> HTML with inline SVG, one style sheet

The policy in its head forbids a browser to fetch anything. The same input makes the same bytes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

from nm_sparsity_jax.report import charts
from nm_sparsity_jax.report.charts import Chart
from nm_sparsity_jax.report.sections import Cell, Run, Section, Strip, Table

_escape = html.escape


def render(runs: Sequence[Run], sections: Sequence[Section], versions: Mapping[str, str]) -> str:
  """The page.

  Args:
    runs: for their names and gin configurations.
    sections: what is shown.
    versions: name -> version of what made the report.
  """
  names = [run.name for run in runs]
  legend = "".join(f'<li class="c{i}"><i></i>{_escape(n)}</li>' for i, n in enumerate(names))
  links = "".join(f'<a href="#{s.key}">{_escape(s.title)}</a>' for s in sections)
  title = f"N:M sparsity: {', '.join(names)}"
  made_by = ", ".join(f"{name} {version}" for name, version in versions.items())
  return "\n".join(
    [
      "<!DOCTYPE html>",
      '<html lang="en">',
      "<head>",
      '<meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      '<meta name="color-scheme" content="light dark">',
      '<meta http-equiv="Content-Security-Policy" '
      "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
      '<link rel="icon" href="data:,">',
      f"<title>{_escape(title)}</title>",
      f"<style>{_style()}</style>",
      "</head>",
      "<body>",
      f'<header><h1>{_escape(title)}</h1><nav aria-label="Sections">{links}</nav></header>',
      f'<ul class="legend" aria-label="Runs">{legend}</ul>',
      "<main>",
      *(part for section in sections for part in _section(section, names)),
      *_configs(runs),
      "</main>",
      f"<footer>Made by {_escape(made_by)}: versions of this report.</footer>",
      "</body>",
      "</html>",
      "",
    ]
  )


def _section(section: Section, names: Sequence[str]) -> Iterator[str]:
  yield f'<section id="{section.key}">'
  yield f"<h2>{_escape(section.title)}</h2>"
  charts: list[str] = []
  for part in section.parts:
    if isinstance(part, Chart):
      charts.append(_figure(part, names))
      continue
    if charts:
      yield _grid(charts)
      charts = []
    if isinstance(part, Table):
      yield _table(part)
    elif isinstance(part, Strip):
      yield _strip(part, names)
    else:
      yield f'<p class="note">{_escape(part)}</p>'
  if charts:
    yield _grid(charts)
  yield "</section>"


def _grid(charts: Sequence[str]) -> str:
  return "\n".join(['<div class="grid-of-charts">', *charts, "</div>"])


def _figure(chart: Chart, names: Sequence[str]) -> str:
  if charts.axes_of(chart) is None:
    drawn = '<p class="note">Nothing can be drawn.</p>'
  else:
    drawn = charts.svg(chart, names)
  note = " ".join(filter(None, [chart.note, chart.left_out]))
  return "\n".join(
    [
      f'<figure id="chart-{_escape(chart.key)}">',
      f"<figcaption>{_escape(chart.title)}{' (log)' if chart.log else ''}</figcaption>",
      drawn,
      *([f'<p class="note">{_escape(note)}</p>'] if note else []),
      f"<details><summary>numbers</summary>{_numbers(chart, names)}</details>",
      "</figure>",
    ]
  )


def _numbers(chart: Chart, names: Sequence[str]) -> str:
  """The points as a table: a row for each x, a column for each line that holds measurements."""
  lines = [line for line in chart.lines if line.run is not None and line.style != "dashed"]
  rows: dict[float, list[str]] = {}
  for i, line in enumerate(lines):
    for x, y in line.points:
      rows.setdefault(x, [""] * len(lines))[i] = f"{y:.6g}" if math.isfinite(y) else str(y)
  heads = [Cell(names[line.run], run=line.run) for line in lines if line.run is not None]

  def name(x: float) -> str:
    return chart.labels[int(x)] if chart.labels else f"{x:,.10g}"

  return _table(Table([chart.x, *heads], [[name(x), *rows[x]] for x in sorted(rows)]))


def _table(table: Table) -> str:
  head = "".join(_cell(cell, "th") for cell in table.head)
  rows = ["".join(_cell(c, "td" if i else "th") for i, c in enumerate(row)) for row in table.rows]
  kind = ' class="words"' if table.words else ""
  body = "\n".join(f"<tr>{row}</tr>" for row in rows)
  return (
    f'<div class="box" tabindex="0"><table{kind}><thead><tr>{head}</tr></thead>\n'
    f"<tbody>\n{body}\n</tbody></table></div>"
  )


def _cell(cell: str | Cell, tag: str) -> str:
  if isinstance(cell, str):
    return f"<{tag}>{_escape(cell)}</{tag}>"
  text = _escape(cell.text)
  if cell.strong:
    text = f"<strong>{text}</strong>"
  if cell.bar is not None:
    width = 100 * min(max(cell.bar, 0.0), 1.0) if math.isfinite(cell.bar) else 0.0
    text = f'<span class="bar"><b style="width:{width:.4g}%"></b></span>{text}'
  elif cell.run is not None:
    text = f"<i></i>{text}"
  colour = "" if cell.run is None else f' class="c{cell.run}"'
  return f"<{tag}{colour}>{text}</{tag}>"


def _strip(strip: Strip, names: Sequence[str]) -> str:
  total = strip.segments[-1][1]
  parts, rows = [], []
  for start, stop, label, density, first, last in strip.segments:
    decay = f"D {first:.3g}" if first == last else f"D {first:.3g} to {last:.3g}"
    # Sparser is darker; even 1:128 is told from dense, and no text loses its contrast.
    shade = 8 + 37 * min(1.0, -math.log2(density) / 7)
    small = f"{start:,}" if label == "dense" else f"{start:,} · {decay}"
    said = f"steps {start:,} to {stop - 1:,}: {label}, {decay}"
    parts.append(
      f'<div style="flex:{stop - start};--shade:{shade:.0f}%" title="{_escape(said)}">'
      f"<b>{label}</b><small>{small}</small></div>"
    )
    rows.append([f"{start:,} .. {stop - 1:,}", label, decay.removeprefix("D ")])
  table = _table(Table(["steps", "pattern", "D"], rows))
  return "\n".join(
    [
      f'<div class="schedule c{strip.run}">',
      f"<h3><i></i>{_escape(names[strip.run])} <span>{_escape(strip.title)}, "
      f"{total:,} steps</span></h3>",
      f'<div class="strip">{"".join(parts)}</div>',
      f"<details><summary>numbers</summary>{table}</details>",
      "</div>",
    ]
  )


def _configs(runs: Sequence[Run]) -> Iterator[str]:
  yield '<section id="gin"><h2>gin configuration</h2>'
  for i, run in enumerate(runs):
    if run.gin:
      yield (
        f'<details class="config c{i}"><summary><i></i>{_escape(run.name)}: config.gin</summary>'
        f'<pre class="box" tabindex="0">{_escape(run.gin)}</pre></details>'
      )
    else:
      yield f'<p class="note">{_escape(run.name)}: there is no config.gin.</p>'
  yield "</section>"


def _style() -> str:
  def variables(colours: Sequence[str]) -> str:
    return "".join(f"--run-{i}:{colour};" for i, colour in enumerate(colours))

  runs = "".join(f".c{i}{{--run:var(--run-{i})}}" for i in range(charts.MAX_RUNS))
  return (
    f":root{{{variables(charts.LIGHT)}{_LIGHT}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{variables(charts.DARK)}{_DARK}}}}}"
    f"{runs}{_CSS}"
  )


_LIGHT = "--ground:#fbfbfa;--card:#fff;--text:#1c2024;--soft:#5b6470;--line:#dfe2e6;--link:#0b5cad;"
_DARK = (
  "--ground:#14171a;--card:#1b1f24;--text:#e6e8ea;--soft:#9aa4af;--line:#333a42;--link:#7db8f0;"
)
_CSS = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-padding-top:3.2rem}
body{margin:0;background:var(--ground);color:var(--text);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
header,main,footer,.legend{max-width:1240px;margin:0 auto;padding:0 16px}
header{padding-top:24px}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .7rem;padding-bottom:.3rem;border-bottom:1px solid var(--line)}
h3{font-size:.9rem;font-weight:600;margin:1rem 0 .3rem;overflow-wrap:anywhere}
h3 span{color:var(--soft);font-weight:400}
a{color:var(--link)}
nav{display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.9rem}
.legend{position:sticky;top:0;z-index:1;display:flex;gap:.3rem 1.1rem;list-style:none;
 margin-top:.8rem;padding-top:.5rem;padding-bottom:.5rem;overflow-x:auto;white-space:nowrap;
 background:var(--ground);border-bottom:1px solid var(--line);font-size:.9rem}
i{display:inline-block;width:.7em;height:.7em;margin-right:.4em;border-radius:50%;
 background:var(--run)}
.note{color:var(--soft);font-size:.86rem;margin:.5rem 0;max-width:75ch;overflow-wrap:anywhere}
.grid-of-charts{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
figure{margin:0;padding:12px 12px 8px;background:var(--card);border:1px solid var(--line);
 border-radius:8px;min-width:0}
figcaption{font-size:.9rem;font-weight:600;margin-bottom:.3rem;overflow-wrap:anywhere}
svg{display:block;overflow:visible;width:100%;height:auto;font-size:10.5px}
svg text{fill:var(--soft)}
svg .grid{stroke:var(--line);stroke-width:1}
svg .axis,svg .tick{stroke:var(--soft);stroke-width:1}
svg .c-none{--run:var(--soft)}
svg polyline{fill:none;stroke:var(--run);stroke-width:1.7;stroke-linejoin:round}
svg polyline.dashed{stroke-width:1.2;stroke-dasharray:4 3;opacity:.8}
svg circle{fill:var(--run)}
.box{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .65rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
thead th{color:var(--soft);font-weight:600}
thead th.c0,thead th[class^=c]{color:var(--text)}
tbody th{font-weight:400;text-align:left}
tbody tr:last-child>*{border-bottom:0}
th:first-child,td:first-child{text-align:left;padding-left:0}
.words th,.words td{text-align:left;vertical-align:top}
.words td{white-space:normal;min-width:6rem;max-width:30rem;overflow-wrap:anywhere}
.words td:nth-child(2){min-width:13rem}
.bar{display:inline-block;width:4.5rem;height:.5rem;margin-right:.6rem;background:var(--line);
 border-radius:3px;overflow:hidden}
.bar b{display:block;height:100%;background:var(--run)}
.strip{display:flex;border:1px solid var(--line);border-radius:6px;overflow:hidden;
 background:var(--card)}
.strip>div{min-width:0;padding:.3rem 0;overflow:hidden;white-space:nowrap;
 background:color-mix(in srgb,var(--run) var(--shade),transparent)}
.strip>div+div{box-shadow:inset 1px 0 var(--card)}
.strip b,.strip small{margin-left:.45rem}
.strip b{display:block;font-size:.86rem;font-weight:600}
.strip small{font-size:.75rem;font-variant-numeric:tabular-nums}
details{margin:.35rem 0;font-size:.86rem}
summary{color:var(--soft);cursor:pointer;width:fit-content}
details .box{max-height:18rem;overflow:auto}
.config pre{max-height:30rem;padding:12px;background:var(--card);border:1px solid var(--line);
 border-radius:8px;font-size:.8rem;line-height:1.45}
.config summary{color:var(--text)}
footer{color:var(--soft);font-size:.8rem;margin-top:2.5rem;padding-bottom:2rem}
"""
