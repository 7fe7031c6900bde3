"""Text of a visitor's is shown as it is: a Markdown reader finds nothing in it but text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from moesim.app.texts import escaped

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
