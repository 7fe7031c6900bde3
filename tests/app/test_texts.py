"""Text on pages (app/texts.py): numbers, words of confidence, and foreign text, which shows as it is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from moesim.app import texts
from moesim.app.texts import compact, escaped, money, plain, span, written
from moesim.hwmodels.confidence import LEVELS
from moesim.simulator.scenario.presets import shipped_presets

# -- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2_504_000.0, "2.50 M"),
        (14.8e12, "14.8 T"),
        (999_999.0, "1.00 M"),
        (999.6, "1.00 k"),
        (999.4, "999"),
        (0.0, "0"),
        (1e-5, "0.00001"),
        (-62_914_560, "-62.9 M"),
    ],
)
def test_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert compact(value) == text


@given(st.floats(-1e18, 1e18, allow_nan=False))
def test_no_number_is_written_with_an_exponent(value: float) -> None:
    for text in (compact(value), plain(value, 4), written("days", value), written("gpu_hours", value)):
        assert "e" not in text.replace("the", "")


def test_money_and_figures_carry_their_unit() -> None:
    assert money(5_061_000.0) == "$5.06 M" and money(None) == "no price"
    assert written("step_time_s", 18.9087) == "18.909 s"
    assert written("memory_bytes", 80 * 2.0**30) == "80.0 GiB"
    assert written("days", 12345.67) == "12,345.7 days"


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.042, "42 ms"),
        (2.731, "2.73 s"),
        (90.0, "90 s"),
        (695.5, "11.6 min"),
        (3600.0, "1 h"),
        (5400.0, "90 min"),
        (172_800.0, "2 days"),
        (0.0, "0 s"),
    ],
)
def test_a_duration_has_the_unit_that_people_would_choose(time_s: float, text: str) -> None:
    assert span(time_s) == text


# -- confidence --------------------------------------------------------------------------------------


def test_every_level_has_a_word_a_meaning_and_a_badge_of_its_own() -> None:
    assert [texts.word(level) for level in LEVELS] == ["measured", "published", "roofline"]
    badges = {texts.badge(level) for level in LEVELS}
    assert len(badges) == len(LEVELS)
    for level in LEVELS:
        assert texts.word(level) in texts.badge(level)  # never by colour alone
        assert ":material/" in texts.badge(level)
        assert texts.meaning(level)
    with pytest.raises(KeyError):
        texts.word("guessed")


def test_only_roofline_is_muted() -> None:
    assert [level for level in LEVELS if texts.muted(level)] == ["peak-only"]


def test_every_preset_has_a_word() -> None:
    assert {texts.word(row.confidence) for row in shipped_presets()} <= set(texts.MEANINGS)


# -- foreign text ------------------------------------------------------------------------------------

READER = MarkdownIt("commonmark").enable("strikethrough").enable("table")
PIECES = st.sampled_from(
    [
        *"\\`*_{}[]()#+-.!|<>~$:^&@=/ 1a\n",
        "![x](http://h/p.png)",
        "<b>",
        "&lt;",
        "1. ",
        "***",
        "~~",
        "http://",
    ]
)


def tokens(text: str) -> set[str]:
    """Kinds of everything that a reader makes of a text, and what it shows."""
    return {
        inner.type
        for token in READER.parse(text)
        for inner in [token, *(token.children or ())]
        if inner.type not in ("paragraph_open", "paragraph_close", "inline")
    }


def shown(text: str) -> str:
    return "".join(
        inner.content for token in READER.parse(text) for inner in (token.children or ()) if inner.content
    )


@given(st.lists(PIECES, max_size=30).map("".join))
def test_nothing_but_text_is_read(text: str) -> None:
    line = escaped(text)
    assert tokens(line) <= {"text", "text_special"}, line
    assert shown(line) == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ("![x](http://host/p.png)", "]("),
        ("see http://host/x", "://"),
        ("www.host.example", ".host"),
        (":material/home: :red[a] :smile:", ":material"),
        ("a@b.example", "@"),
        ("$x$ and $y$", "$"),
    ],
)
def test_what_the_framework_adds_to_markdown_is_escaped_too(text: str, forbidden: str) -> None:
    assert not re.search(rf"(?<!\\){re.escape(forbidden)}", escaped(text)) and "\\" in escaped(text)


def test_usual_messages_stay_as_they_are() -> None:
    for text in ("parallel.ep=48 does not divide; nearest: 32, 64", "cluster.node.nic_bandwidth: 5 GB/s (x)"):
        assert escaped(text) == text
