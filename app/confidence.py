"""The evidence behind a prediction in one word, and as a badge."""

from __future__ import annotations

from collections.abc import Mapping

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


def badge(confidence: str) -> str:
    """The word as a Markdown badge with an icon, so that colour is never the only cue."""
    shown = word(confidence)
    colour, icon = _BADGES[shown]
    return f":{colour}-badge[:material/{icon}: {shown}]"


def meaning(confidence: str) -> str:
    """What a level of confidence says about a prediction, as a clause."""
    return MEANINGS[word(confidence)]
