"""Numbers, words of confidence and foreign text as every page writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

# -- number text -------------------------------------------------------------------------------------
# Numbers as every page writes them: three significant digits, a prefix, a unit, and never an exponent.

PREFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
"""Size and letter of the prefixes; B is 10^9, as in a count of tokens or parameters."""


def compact(value: float) -> str:
    """A number with three significant digits and a metric prefix, such as "2.50 M"."""
    rounded = float(f"{value:.3g}")  # 999,999 is 1.00 M, not 1,000 k
    for size, letter in PREFIXES:
        if abs(rounded) >= size:
            scaled = rounded / size
            return (f"{scaled:,.0f}" if abs(scaled) >= 1e3 else f"{scaled:#.3g}".rstrip(".")) + f" {letter}"
    return plain(value)


def plain(value: float, digits: int = 3) -> str:
    """A number with a few significant digits, written out."""
    text = f"{value:.{digits}g}"
    return format(Decimal(text), "f") if "e" in text else text


def money(value: float | None) -> str:
    """Dollars with three significant digits and a metric prefix."""
    return "no price" if value is None else f"${compact(value)}"


def written(name: str, value: float) -> str:
    """A figure (a name of `headline.tiles`) as its tile shows it, such as "18.703 s" or "$5.01 M"."""
    forms = {
        "step_time_s": f"{value:.3f} s",
        "tokens_per_s_per_gpu": f"{value:,.0f}",
        "mfu_causal": f"{value:.1%}",
        "mfu_noncausal": f"{value:.1%}",
        "days": f"{value:,.1f} days",
        "cost_usd": money(value),
        "memory_bytes": f"{value / 2**30:.1f} GiB",
    }
    return forms.get(name, compact(value))


def span(time_s: float) -> str:
    """A duration in the unit that people would choose, such as "2.73 s", "11.6 min" or "1 h"."""
    for size_s, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if time_s >= 2.0 * size_s or (time_s >= size_s and time_s % size_s == 0.0):
            return f"{plain(time_s / size_s)} {unit}"
    return f"{plain(time_s)} s" if time_s >= 1.0 or time_s == 0.0 else f"{plain(time_s * 1e3)} ms"


# -- escaping ----------------------------------------------------------------------------------------
# Escapes foreign text, because the framework reads most of what it shows as Markdown.

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


# -- confidence --------------------------------------------------------------------------------------
# The evidence behind a prediction in one word, and as a badge.

WORDS: Mapping[str, str] = {"measured": "measured", "published": "published", "peak-only": "roofline"}
"""The word for each level of confidence (`moesim.hwmodels.confidence.LEVELS`), best first."""

_BADGES: Mapping[str, tuple[str, str]] = {
    "measured": ("green", "verified"),
    "published": ("blue", "menu_book"),
    "roofline": ("gray", "show_chart"),
}
"""Colour and icon of each word; roofline is grey, because it is the least sure."""

MEANINGS: Mapping[str, str] = {
    "measured": "GEMM rates were measured on this accelerator",
    "published": "GEMM rates are published or derived from published figures",
    "roofline": "GEMM rates are datasheet peaks with an assumed efficiency",
}
"""What each word says."""


def word(confidence: str) -> str:
    """The word for a level of confidence; raises KeyError for a level that does not exist."""
    return WORDS[confidence]


def muted(confidence: str) -> bool:
    """Whether figures of this level are drawn muted, because nothing measured stands behind them."""
    return word(confidence) == "roofline"


def rates(confidence: str) -> str:
    """The word with what it is a word of, such as "measured rates"."""
    shown = word(confidence)
    return shown if shown == "roofline" else f"{shown} rates"


def badge(confidence: str) -> str:
    """The word as a Markdown badge with an icon, so that colour is never the only cue."""
    colour, icon = _BADGES[word(confidence)]
    return f":{colour}-badge[:material/{icon}: {rates(confidence)}]"


def basis_badge(level: str, reason: str) -> str:
    """What a figure stands on: the rates, or that it is assumed or not known, with the reason beside it."""
    marks = {"assumed": ("orange", "edit_note", "assumed"), "unknown": ("gray", "help", "not known")}
    if level not in marks:
        return f"{badge(level)} {escaped(reason)}"
    colour, icon, shown = marks[level]
    return f":{colour}-badge[:material/{icon}: {shown}] {escaped(reason)}"


def meaning(confidence: str) -> str:
    """What a level of confidence says about a prediction, as a clause."""
    return MEANINGS[word(confidence)]
