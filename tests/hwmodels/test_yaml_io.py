from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import BytesPerSecond
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import MAX_YAML_BYTES, dump_mapping, load_mapping, parse_mapping

BOMB = "\n".join(['a0: &a0 ["x"]'] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)])


def test_a_date_is_its_text() -> None:
    assert parse_mapping("a: 2024-12-01\n2024-12-02: b\n", "f.yaml") == {"a": "2024-12-01", "2024-12-02": "b"}


def test_whole_numbers_in_every_base() -> None:
    text = "a: 0xff\nb: 0o17\nc: 0b101\nd: -1_000\ne: 9223372036854775807\n"
    assert list(parse_mapping(text, "f.yaml").values()) == [255, 15, 5, -1000, 2**63 - 1]


@pytest.mark.parametrize(
    ("plain", "value"),
    [
        ("160e9", 160e9), (".5e3", 500.0), ("1.", 1.0), ("-0.0", -0.0), ("1_0.5", 10.5), ("07", 7), ("+3", 3),
        ("on", "on"), ("No", "No"), ("1:30", "1:30"), ("50 GB/s", "50 GB/s"), ("1f1b", "1f1b"), ("-", "-"),
        ("2026-11", "2026-11"), ("580.159.04", "580.159.04"), ("0x", "0x"), ("e5", "e5"), ("=", "="),
        ("TRUE", True), ("tRUE", "tRUE"), ("~", None), ("Null", None), ("", None), ("'~'", "~"),
        ("!!str 5", "5"), ("!!float 1.5", 1.5), ("[1, 2.5, -4]", [1, 2.5, -4]),
    ],
)  # fmt: skip
def test_yaml_is_version_1_2(plain: str, value: object) -> None:
    found = parse_mapping(f"a: {plain}\n" if plain != "-" else "a: '-'\n", "f.yaml")["a"]
    assert (found, type(found)) == (value, type(value))


def test_texts_in_blocks_and_over_several_lines() -> None:
    text = "a: >-\n  one\n  two\nb: |\n  one\n  two\nc: {d: 'x\n  y'}\ne: one\n  two\n"
    assert parse_mapping(text, "f.yaml") == {
        "a": "one two", "b": "one\ntwo\n", "c": {"d": "x y"}, "e": "one two"
    }  # fmt: skip


def test_json_is_read_by_its_extension(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5, "x"], "b": null}')  # with a byte order mark
    assert load_mapping(path) == {"a": [1, 2.5, "x"], "b": None}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("f.yaml", "", ["f.yaml", "empty"]),
        ("f.yaml", "# only a comment\n", ["no data"]),
        ("f.yaml", "just words", ["a text", "mapping"]),
        ("f.yaml", "a: 1\na: 2\n", ["line 2", "duplicate key"]),
        ("f.yaml", "a: 1\nb: [1, 2\nc: 3\n", ["line 3", "not valid YAML"]),
        ("f.yaml", "a: !!python/object:os.system x\n", ["not valid YAML"]),
        ("f.yaml", "%YAML 1.1\n---\na: on\n", ["directive"]),
        ("f.yaml", "a: !!bool maybe\n", ["line 1", "'maybe'", "leave tags out"]),
        ("f.yaml", 'a: !!int ""\n', ["line 1", "cannot have the tag 'int'"]),
        ("f.yaml", "a: !!set {x}\n", ["line 1", "the tag 'set'"]),
        ("f.yaml", "<<: {a: 1}\n", ["line 1", "merge key << is refused"]),
        ("f.yaml", "a: 1\n[[]]: 1\n", ["line 2", "a key must be a text"]),
        ("f.yaml", f"a: {'9' * 400}\n", ["line 1", "at most 40 characters"]),
        ("f.yaml", f"a: 0x{'f' * 5000}\n", ["line 1", "16 if hexadecimal"]),
        ("f.yaml", "a: 9223372036854775808\n", ["0x8000000000000000", "nearest: 9223372036854775807"]),
        ("f.yaml", "a: 1e999\n", ["numbers are finite"]),
        ("f.yaml", 'a: "\\ud800"\n', ["line 1", "Unicode character escape"]),
        ("f.yaml", "a: \ud800\n", ["half of a pair"]),
        ("f.yaml", 'a: "\\0"\n', ["zero byte"]),
        ("f.yaml", f"a: [{'1,' * 30_000}]\n", ["more than 20,000 keys and values", "JSON"]),
        ("f.yaml", f"a: {'[' * 60}{']' * 60}\n", ["more than 40 levels"]),
        ("f.json", f'{{"a": {"9" * 400}}}', ["whole numbers are from -2^63"]),
        ("f.json", f'{{"a": {"9" * 5000}}}', ["not valid JSON"]),
        ("f.json", '{"a": 1e999}', ["numbers are finite"]),
        ("f.json", '{"a": "\\ud800"}', ["half of a pair"]),
        ("f.json", '{"a": "\\u0000"}', ["zero byte"]),
        ("f.json", f'{{"a": [{"0, " * 100_000}0]}}', ["more than 100,000 values"]),
        ("f.json", f"{{{', '.join(f'{chr(34)}k{i}{chr(34)}: 1' for i in range(25_000))}}}", ["20,000 keys"]),
        ("f.yaml", "a: 1\n---\nb: 2\n", ["line 2", "not valid YAML", "second document"]),
        ("f.yaml", "a: \x00", ["zero byte"]),
        ("f.yaml", "b: 1\na: \x07", ["line 2", "not valid YAML", "'\\x07' is not allowed"]),
        ("f.yaml", BOMB, ["line 2", "alias *a0", "refused"]),
        ("f.yaml", "a: " + "[" * 5000 + "]" * 5000, ["nested too deeply"]),
        ("f.json", '{"a": 1, "a": 2}', ["'a' appears twice"]),
        ("f.json", '{"a": 1,\n"b": }', ["line 2", "not valid JSON"]),
        ("f.json", '{"a": NaN}', ["NaN is not a JSON number"]),
        ("f.json", "[1]", ["a list"]),
        ("f.json", "[" * 100_000, ["nested too deeply"]),
    ],
)
def test_bad_text_is_one_paragraph(name: str, text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_mapping(text, name)
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert "\n" not in message
    assert len(message) < 300
    for word in words:
        assert word in message


def test_bad_files(tmp_path: Path) -> None:
    binary = tmp_path / "b.yaml"
    binary.write_bytes(bytes([0x89, 0x50, 0x4E, 0x47, 0xFF, 0xFE]))
    with pytest.raises(InputError, match=r"b\.yaml: not a text file"):
        load_mapping(binary)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"a: 1\n" + b"#" * MAX_YAML_BYTES)
    with pytest.raises(InputError, match=r"larger than the limit of 0.5 MB for a YAML file"):
        load_mapping(big)
    with pytest.raises(InputError, match="cannot be read"):
        load_mapping(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match=r"unknown file type '\.toml'"):
        load_mapping(tmp_path / "f.toml")


_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | _FLOATS
_TEXTS = st.text("abc: -#'\"{}", max_size=10)
_VALUES = st.recursive(_SCALARS | _TEXTS, lambda x: st.lists(x, max_size=3), max_leaves=5)
_KEYS = st.text("abcdefghij_", min_size=1, max_size=8)


def test_written_texts_mean_the_same_to_readers_of_yaml_1_1() -> None:
    data = {"a": ["on", "1:30", "2026-01-02", "1e5", "0o17", "null", "=", "<<", ""], "b": 1e16, "c": "x\ny\n"}
    data["d"] = data["a"]
    text = dump_mapping(data)
    assert parse_mapping(text, "f.yaml") == data
    assert yaml.safe_load(text) == data | {"b": "1e+16"}  # a number of YAML 1.2 only


def test_short_values_stand_in_one_line_where_asked() -> None:
    data = {"a": [[1, 2], [3, 4]], "b": {"c": "x", "d": [{"e": 1}]}, "f": {"g": 1}}
    assert dump_mapping(data, compact=frozenset({"b"})) == (
        "a:\n- [1, 2]\n- [3, 4]\nb: {c: x, d: [{e: 1}]}\nf:\n  g: 1\n"
    )


@given(st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=5))
def test_dump_and_parse_round_trip(data: dict[str, Any]) -> None:
    assert parse_mapping(dump_mapping(data), "f.yaml") == data


class Inner(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth: BytesPerSecond
    kind: Literal["nvlink", "nic"] = "nic"


class Outer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    inner: Inner | None = None
    many: dict[str, Inner] = {}
    listed: tuple[Inner, ...] = ()
    either: int | Inner = 0
    rates: dict[Literal["bf16", "fp8"], int] = {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"iner": {}}, ["s.yaml: iner: unknown key (nearest: 'inner')", "the keys here are"]),
        ({"inner": {"bandwith": "1 GB/s"}}, ["inner.bandwith: unknown key (nearest: 'bandwidth')"]),
        ({"inner": {"bandwith": "1 GB/s"}}, ["the key inner.bandwidth is missing"]),
        (
            {"many": {"a": {"bandwidth": "1 GB/s", "knd": "nic"}}},
            ["many.a.knd: unknown key (nearest: 'kind')"],
        ),
        (
            {"listed": [{"bandwidth": "1 GB/s", "knd": "nic"}]},
            ["listed.0.knd: unknown key (nearest: 'kind')"],
        ),
        ({"inner": {"bandwidth": "1 GB"}}, ["inner.bandwidth: '1 GB' is a number of bytes", "a bandwidth"]),
        ({"inner": {"bandwidth": 5}}, ["inner.bandwidth: '5' is a bare number"]),
        (
            {"inner": {"bandwidth": "1 GB/s", "kind": "nvlnk"}},
            ["inner.kind='nvlnk'", "nvlink, nic", "(nearest: 'nvlink')"],
        ),
        ({"either": {"bandwidth": "fast"}}, ["either.bandwidth: 'fast' is not a quantity"]),
        ({"rates": {"bf15": 3}}, ["rates.bf15", "bf16, fp8", "(nearest: 'bf16')"]),
        ({"rates": {"bf16": "x" * 500}}, ["rates.bf16='xxx", "...", "valid integer"]),
        ({"inner": 7}, ["inner=7"]),
    ],
)
def test_validation_names_place_path_value_and_nearest(data: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        validate_model(Outer, data, "s.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for word in words:
        assert word in message


def test_of_many_problems_the_first_are_described() -> None:
    data: dict[str, object] = {f"key{i}": i for i in range(20_000)} | {"listed": [{}] * 20_000}
    with pytest.raises(InputError, match=r"listed\.0\.bandwidth") as caught:
        validate_model(Outer, data, "s.yaml")
    assert re.search(r"\d{5} more$", str(caught.value)) and len(str(caught.value)) < 2000


def test_a_list_that_is_too_short_is_named() -> None:
    class Pairs(BaseModel):
        pairs: tuple[tuple[int, int], ...]

    with pytest.raises(InputError, match=r"pairs\.0\.1"):
        validate_model(Pairs, {"pairs": [[1]]}, "s.yaml")
