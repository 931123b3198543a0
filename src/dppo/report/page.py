"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

from dppo.report.options import compared_options
from dppo.report.picture import Picture
from dppo.report.read import RunData
from dppo.report.table import headline

_CSS = """\
body { margin: 0 auto; max-width: 46rem; padding: 0.5rem 0.9rem 3rem; color: #1a1a1a;
  background: #fff; font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 1rem 0 0.5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
figure { margin: 0; break-inside: avoid; }
img { display: block; width: 100%; height: auto; }
figcaption, .small { font-size: 0.9rem; color: #444; }
figcaption { margin-top: 0.3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; min-width: 100%; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.9rem 0.25rem 0;
  border-bottom: 1px solid #ddd; overflow-wrap: normal; }
thead th { overflow-wrap: anywhere; min-width: 6.5rem; }
tbody th { font-weight: normal; color: #444; position: sticky; left: 0; background: #fff; }
td.text { overflow-wrap: anywhere; min-width: 6.5rem; }
.options { columns: 2 15rem; padding: 0; list-style: none; }
code, .options, .text { font: 0.8rem/1.45 ui-monospace, monospace; }
@media print {
  body { max-width: none; padding: 0; color: #000; font-size: 10pt; }
  figcaption, .small, tbody th { color: #000; }
  section.figure, figure, tr, li { break-inside: avoid; }
  h2 { break-after: avoid; }
  img { width: auto; max-width: 15cm; max-height: 21cm; }
  .wide { overflow: visible; }
  table { font-size: 8pt; }
  th, td, thead th, td.text { min-width: 0; padding-right: 0.4rem; overflow-wrap: anywhere; }
}
"""


def make_page(runs: Sequence[RunData], pictures: Sequence[Picture], *, title: str) -> str:
    """Puts everything together.

    Args:
        runs: The runs.
        pictures: Of the runs, from `make_pictures`.
        title: Of the page.

    Returns:
        The HTML.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _runs(runs),
        _headline(runs),
        *(_figure(picture) for picture in pictures if picture.png),
        _left_out(pictures),
        _options(runs),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _runs(runs: Sequence[RunData]) -> str:
    lines = []
    for run in runs:
        notes = f": {'; '.join(run.notes)}" if run.notes else ""
        path = f"<code>{escape(str(run.path))}</code>"
        lines.append(f"<li><strong>{escape(run.name)}</strong> {path}{escape(notes)}</li>")
    return "<ul>\n" + "\n".join(lines) + "\n</ul>"


def _headline(runs: Sequence[RunData]) -> str:
    rows, absent = headline(runs)
    about = [
        "Rewards ± their standard error. Seconds by phase are of training, with their share. "
        "Tokens are completion tokens."
    ]
    if any(None in cells for _, cells in rows):
        about.append("An empty cell: not recorded by this run.")
    if absent:
        about.append(f"Not recorded by any run: {', '.join(absent)}.")
    return (
        f'<h2 id="numbers">Numbers</h2>\n{_table(rows, [run.name for run in runs])}\n'
        f'<p class="small">{escape(" ".join(about))}</p>'
    )


def _table(
    rows: Iterable[tuple[str, Sequence[str | None]]], names: Sequence[str], *, kind: str = "number"
) -> str:
    """A table that scrolls by itself where it is wider than the screen."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = [
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f'<td class="{kind}">{escape(cell or "")}</td>' for cell in cells)
        + "</tr>"
        for label, cells in rows
    ]
    return (
        f'<div class="wide"><table>\n<thead><tr><td></td>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>"
    )


def _figure(picture: Picture) -> str:
    data = b64encode(picture.png).decode("ascii")
    caption = escape(picture.caption)
    if picture.without:
        without = f"Left out, for lack of {picture.needs}: {', '.join(picture.without)}."
        caption += f"<br>{escape(without)}"
    return (
        f'<section class="figure" id="{picture.key}">\n<h2>{escape(picture.title)}</h2>\n'
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(picture.alt)}">\n'
        f"<figcaption>{caption}</figcaption></figure>\n</section>"
    )


def _left_out(pictures: Sequence[Picture]) -> str:
    absent = [f"{p.title} ({p.needs})" for p in pictures if not p.png]
    if not absent:
        return ""
    return f'<p class="small">{escape("Not drawn, for lack of records: " + "; ".join(absent))}.</p>'


def _options(runs: Sequence[RunData]) -> str:
    differ, same = compared_options(runs)
    if not differ and not same:
        return (
            '<p class="small">Options and versions: not known before summary.json is written.</p>'
        )
    parts = ['<h2 id="options">Options and versions</h2>']
    if differ:
        names = [run.name for run in runs]
        parts += [
            "<p>Where the runs differ; an empty cell: at its default, or not known yet:</p>",
            _table(differ, names, kind="text"),
        ]
    if same:
        items = "\n".join(
            f"<li>{escape(name)}: {escape(cells[0] or '')}</li>" for name, cells in same
        )
        which = "The same in all runs" if len(runs) > 1 else "Not at their defaults"
        parts.append(f'<p>{which}:</p>\n<ul class="options">\n{items}\n</ul>')
    return "\n".join(parts)
