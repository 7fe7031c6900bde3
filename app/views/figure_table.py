"""A table of figures as HTML: a column for each subject, with intervals and differences below the figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """<style>
.figures {overflow-x: auto}
.figures table {border-collapse: collapse; width: 100%; font-size: 0.875rem;
  font-variant-numeric: tabular-nums}
.figures th, .figures td {text-align: left; vertical-align: top; padding: 0.3rem 0.75rem 0.3rem 0;
  border-bottom: 1px solid light-dark(#e3e6eb, #333946); min-width: 8.5rem; line-height: 1.3;
  overflow-wrap: anywhere}
.figures tbody th {font-weight: 400; min-width: 7rem; color: light-dark(#4a505b, #b6bbc6)}
.figures thead th {font-weight: 600; font-size: 0.95rem; border-bottom-width: 2px}
@media (max-width: 640px) {.figures table {font-size: 0.8rem}
  .figures th, .figures td {min-width: 6.5rem; padding-right: 0.4rem} .figures tbody th {min-width: 4.8rem}}
.figures .group th {font-weight: 600; padding-top: 0.8rem; color: inherit}
.figures .main {font-weight: 600; font-size: 0.95rem}
.figures small {display: block; font-size: 0.78rem; color: light-dark(#5f6670, #a3a8b4); font-weight: 400}
.figures .roofline, .figures .roofline .main {color: light-dark(#5f6670, #a3a8b4); font-style: italic}
.figures .better {color: light-dark(#116b2c, #56d364)}
.figures .worse {color: light-dark(#b42318, #ff8f85)}
.figures .badge {display: inline-block; border-radius: 0.6rem; padding: 0 0.5rem; font-size: 0.75rem;
  font-style: normal; font-weight: 600; border: 1px solid currentColor}
.figures .measured {color: light-dark(#116b2c, #56d364)}
.figures .published {color: light-dark(#0b5cad, #79c0ff)}
.figures .peak-only {color: light-dark(#5f6670, #a3a8b4)}
</style>"""
"""Colours with at least 4.5 to 1 against the page in both themes; none is the only cue."""


def table(label: str, heads: Sequence[str], lines: Sequence[str], faint: Sequence[bool]) -> str:
    """The whole table; `heads` are HTML, `lines` come from `line` and `group`, `faint` mutes columns."""
    cells = "".join(_cell("th", head, mute, ' scope="col"') for head, mute in zip(heads, faint, strict=True))
    return (
        f'{STYLE}<div class="figures" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table><thead><tr><th scope="col">&nbsp;</th>{cells}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def line(label: str, cells: Sequence[str], faint: Sequence[bool]) -> str:
    """A row of HTML cells."""
    joined = "".join(_cell("td", cell, mute) for cell, mute in zip(cells, faint, strict=True))
    return f'<tr><th scope="row">{escape(label)}</th>{joined}</tr>'


def group(title: str, columns: int) -> str:
    """A heading over the rows that follow."""
    return f'<tr class="group"><th scope="rowgroup" colspan="{columns + 1}">{escape(title)}</th></tr>'


def main(text: str) -> str:
    """A figure, drawn strongly."""
    return f'<span class="main">{escape(text)}</span>'


def note(text: str) -> str:
    """A smaller line below a figure."""
    return f"<small>{escape(text)}</small>" if text else ""


def difference(text: str, better: bool) -> str:
    """A line with a difference beyond its own uncertainty; one within it is a plain `note`."""
    return f'<small class="{"better" if better else "worse"}">{escape(text)}</small>'


def badge(confidence: str, word: str) -> str:
    """The word for a level of confidence in its colour."""
    return f'<span class="badge {escape(confidence)}">{escape(word)}</span>'


def _cell(tag: str, content: str, faint: bool, more: str = "") -> str:
    return f"<{tag}{more}{' class=roofline' if faint else ''}>{content}</{tag}>"
