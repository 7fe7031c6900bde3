from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import (
    DIMENSIONS,
    Bytes,
    BytesPerSecond,
    Count,
    Fraction,
    format_quantity,
    parse_quantity,
    quantity_text,
)
from moesim.hwmodels.validation import validate_model


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("50 GB/s", "bytes_per_s", 50e9),
        ("400 Gb/s", "bytes_per_s", 50e9),
        ("400Gbps", "bytes_per_s", 50e9),
        ("1 GiB/s", "bytes_per_s", 2.0**30),
        ("80 GiB", "bytes", 80 * 2.0**30),
        ("1_024 B", "bytes", 1024.0),
        ("3.7 us", "s", 3.7e-6),
        ("3.7 µs", "s", 3.7e-6),
        ("2 h", "s", 7200.0),
        ("989 TFLOP/s", "flop_per_s", 989e12),
        ("249.8 GFLOP", "flop", 249.8e9),
        ("$2/h", "usd_per_hour", 2.0),
        ("$2/GPU-h", "usd_per_hour", 2.0),
        ("$5.576M", "usd", 5.576e6),
        ("10.2 kW", "w", 10200.0),
        ("1 kWh", "j", 3.6e6),
        ("$87.1/MWh", "usd_per_kwh", 0.0871),
        ("582.3 gCO2e/kWh", "kg_per_kwh", 0.5823),
        ("3.79 /1000 node-days", "per_node_day", 0.00379),
        ("85 %", "fraction", 0.85),
        ("0.85", "fraction", 0.85),
        ("1e3 B", "bytes", 1000.0),
        (".5 s", "s", 0.5),
    ],
)
def test_parse_known_spellings(text: str, dimension: str, value: float) -> None:
    assert parse_quantity(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension", "words"),
    [
        ("50", "bytes_per_s", ["bare number", "a bandwidth", "50 GB/s"]),
        ("50 GiB", "bytes_per_s", ["a number of bytes", "a bandwidth is expected"]),
        ("50 gb/s", "bytes_per_s", ["unknown unit 'gb/s'", "'Gb/s'"]),
        ("50 parsec", "s", ["unknown unit 'parsec'", "a time"]),
        ("$2", "usd_per_hour", ["an amount of money", "a price per hour"]),
        ("fast", "hz", ["'fast' is not a quantity", "1.83 GHz"]),
        ("-3 s", "s", ["out of range"]),
        ("1e999 B", "bytes", ["out of range"]),
        ("9" * 200 + " B", "bytes", ["is not a quantity"]),
        ("50 %", "count", ["a fraction", "a count"]),
    ],
)
def test_wrong_text_says_what_is_expected(text: str, dimension: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_quantity(text, dimension)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(sorted(DIMENSIONS)), st.floats(0, 1e30, allow_nan=False, allow_subnormal=False))
def test_file_text_round_trips_exactly(dimension: str, value: float) -> None:
    assert parse_quantity(quantity_text(value, dimension), dimension) == value


@given(st.sampled_from(sorted(DIMENSIONS)), st.floats(1e-9, 1e24, allow_nan=False))
def test_text_for_people_is_near_and_parses(dimension: str, value: float) -> None:
    again = parse_quantity(format_quantity(value, dimension), dimension)
    assert math.isclose(again, value, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (50e9, "bytes_per_s", "50 GB/s"),
        (80 * 2.0**30, "bytes", "80 GiB"),
        (19.926, "s", "19.93 s"),
        (0.0, "s", "0 ns"),
        (2.0, "usd_per_hour", "$2/h"),
        (5_576_000.0, "usd", "$5576000"),
        (0.85, "fraction", "0.85"),
        (0.00379, "per_node_day", "3.79 /1000node-days"),
    ],
)
def test_text_for_people(value: float, dimension: str, text: str) -> None:
    assert format_quantity(value, dimension) == text


@given(st.sampled_from(sorted(DIMENSIONS)))
def test_every_example_and_shown_unit_is_accepted(dimension: str) -> None:
    table = DIMENSIONS[dimension]
    parse_quantity(table.example, dimension)
    assert all(unit in table.units for unit in (*table.shown, table.base))
    assert table.units[table.base] == 1


class Link(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth: BytesPerSecond
    buffer: Bytes
    share: Fraction = 1.0
    lanes: Count = 1


def test_file_needs_a_unit_and_code_may_give_si() -> None:
    from_file = validate_model(Link, {"bandwidth": "50 GB/s", "buffer": "1 MiB"}, "link.yaml")
    assert from_file == Link(bandwidth=50e9, buffer=2.0**20)
    with pytest.raises(InputError, match=r"link.yaml: bandwidth.*bare number.*50 GB/s"):
        validate_model(Link, {"bandwidth": 50e9, "buffer": "1 MiB"}, "link.yaml")
    with pytest.raises(ValueError, match="bare number"):
        Link.model_validate_json('{"bandwidth": 5e10, "buffer": "1 MiB"}')


@given(st.floats(1e3, 1e18), st.just(0.0) | st.floats(1.0, 1e18))
def test_dumps_load_back(bandwidth: float, buffer: float) -> None:
    link = Link(bandwidth=bandwidth, buffer=buffer, share=0.3)
    assert Link.model_validate_json(link.model_dump_json()) == link
    assert Link(**link.model_dump()) == link
    assert validate_model(Link, link.model_dump(mode="json"), "dump.json") == link


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, True, None, [1]])
def test_code_may_not_give_nonsense(value: object) -> None:
    with pytest.raises(ValueError):
        Link(bandwidth=value, buffer=1.0)
