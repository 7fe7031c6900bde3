"""The quick reader of YAML agrees with the full one on every text that it takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.full_yaml import read_full_yaml
from moesim.hwmodels.plain_yaml import read_plain_yaml
from moesim.hwmodels.yaml_io import parse_mapping

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(
    path for part in ("hwmodels", "simulator") for path in (ROOT / part / "data").rglob("*.yaml")
)
EDITS = [
    *".:-#,[]{}\"'&*!|>%@`?=~07ex_é",
    "yes",
    "null",
    "True",
    ".5",
    "1e3",
    "1:30",
    "0o7",
    "07",
    "1_0",
    "<<",
]
EDITS += [
    " ",
    "\n",
    "\n  ",
    "\n\n",
    ": ",
    "- ",
    " #",
    "  - ",
    "? ",
    ">-\n",
    "\t",
    "{a: b}",
    ", ",
    "---",
    ".inf",
]

TAKEN = [
    ("a: 1\nb: [1, 2.5, 1e3, -4]\n", {"a": 1, "b": [1, 2.5, 1000.0, -4]}),
    ("a:\n- x: 1\n  z: 'two'\n- 3\n", {"a": [{"x": 1, "z": "two"}, 3]}),
    ("a: >-\n  one\n  two\nb: |\n  one\n  two\n", {"a": "one two", "b": "one\ntwo\n"}),
    ("a: one\n  two\nb: {c: 'x\n  y', d: ~}\n", {"a": "one two", "b": {"c": "x y", "d": None}}),
    (
        "a: 50 GB/s\nb: 1f1b\nc: 2026-11\nd: 580.159.04\n",
        {"a": "50 GB/s", "b": "1f1b", "c": "2026-11", "d": "580.159.04"},
    ),
]
LEFT = [
    "a: 1\na: 2\n",
    "a: *b\n",
    "a: !!int 1\n",
    "- 1\n",
    "a: 0x10\n",
    'a: "\\n"\n',
    "a: 1\n b: 2\n",
    "a: [1, 2\n",
    "---\na: 1\n",
]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type and order too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return (
        one == other if not isinstance(one, list) else len(one) == len(other) and all(map(same, one, other))
    )


@pytest.mark.parametrize(("text", "data"), TAKEN)
def test_common_texts_are_read_like_the_full_reader_reads_them(text: str, data: dict[str, Any]) -> None:
    assert same(read_plain_yaml(text), data) and same(read_full_yaml(text), data)


@pytest.mark.parametrize("text", LEFT)
def test_unusual_and_malformed_texts_are_left_to_the_full_reader(text: str) -> None:
    assert read_plain_yaml(text) is None


def test_almost_every_shipped_file_is_read_quickly() -> None:
    left = [path.name for path in SHIPPED if read_plain_yaml(path.read_text("utf-8")) is None]
    assert len(SHIPPED) > 200 and len(left) <= 3, left


def test_the_readers_agree_on_edited_parts_of_shipped_files() -> None:
    draw, texts, taken = random.Random(16), [path.read_text("utf-8") for path in SHIPPED], 0
    for _ in range(600):
        lines = draw.choice(texts).split("\n")
        first = draw.randrange(len(lines))
        indent = len(lines[first]) - len(lines[first].lstrip(" "))
        some = [line[min(indent, len(line) - len(line.lstrip(" "))) :] for line in lines[first : first + 5]]
        text = "\n".join(some) + "\n"
        for _ in range(draw.randint(0, 3)):
            at = draw.randint(0, len(text))
            text = text[:at] + draw.choice(EDITS) + text[at + draw.randint(0, 2) :]
        plain = read_plain_yaml(text)
        if plain is None:
            continue
        taken += 1
        try:
            full = read_full_yaml(text)
        except InputError as error:
            full = str(error)
        assert same(plain, full), f"{text!r}: {plain} and {full}"
    assert taken > 150


def test_a_refused_text_keeps_its_message_with_the_line() -> None:
    with pytest.raises(InputError, match=r"x\.yaml: line 2: not valid YAML: the duplicate key 'a'"):
        parse_mapping("a: 1\na: 2\n", "x.yaml")
