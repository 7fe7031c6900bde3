"""Escapes foreign text, because the framework reads most of what it shows as Markdown."""

from __future__ import annotations

import re

_MARKUP = re.compile(
    r"[\\`*\[\]$~<]"  # emphasis, code, links and pictures, formulas, coloured text, tags
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    r"|:(?=//|[A-Za-z0-9_+/-]+[:\[])"  # addresses, :icons:, :colours[
    r"|(?<=www)\.|@"
    r"|&(?=[#A-Za-z0-9]+;)"
)
_LINE_START = re.compile(r"^(\s*)([#>+=-]|\d+(?=[.)]))")


def escaped(text: object) -> str:
    """One line that shows `text` literally where Markdown is read, without links, pictures or formulas."""
    line = " ".join(str(text).split())
    marked = _MARKUP.sub(lambda found: f"\\{found[0]}", line)
    start = _LINE_START.match(marked)
    if start is None:
        return marked
    if start[2].isdigit():
        return f"{marked[: start.end()]}\\{marked[start.end() :]}"
    return f"\\{marked}"
