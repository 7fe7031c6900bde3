from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.calibration import LOST_BESIDE_NCCL
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import (
    ProvenanceRow,
    SourcedBytesPerSecond,
    SourcedCount,
    SourcedFraction,
    provenance_rows,
)
from moesim.hwmodels.units import DIMENSIONS, parse_quantity
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.memory.gpu import BUFFERS_SLACK, FRAMEWORK_BYTES, FSDP_SLACK, REPLAY_ERRORS

GOOD = {"value": "50 GB/s", "kind": "spec", "source": "a data sheet", "date": "2024-12"}


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth: SourcedBytesPerSecond
    lanes: SourcedCount | None = None
    shares: dict[str, SourcedFraction] = {}
    parts: tuple[Part, ...] = ()


def test_rows_walk_models_mappings_and_sequences() -> None:
    share, lanes = {**GOOD, "value": 0.5}, {**GOOD, "value": 8}
    data = {"bandwidth": GOOD, "shares": {"x": share}, "parts": [{"bandwidth": GOOD, "lanes": lanes}]}
    rows = provenance_rows(validate_model(Part, data, "f.yaml"), "part")
    assert [row.path for row in rows] == [
        "part.bandwidth", "part.shares.x", "part.parts.0.bandwidth", "part.parts.0.lanes",
    ]  # fmt: skip
    assert rows[0] == ProvenanceRow("part.bandwidth", 50e9, "bytes_per_s", "spec", "a data sheet", "2024-12")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "   "}, "source"),
        ({"kind": "guessed"}, "spec, measured, published, derived, assumed"),
        ({"date": "last year"}, "date"),
        ({"value": 50}, "bare number"),
        ({"unit": "GB/s"}, "unknown key"),
    ],
)
def test_incomplete_provenance_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate_model(Part, {"bandwidth": {**GOOD, **change}}, "f.yaml")


def test_short_form_is_an_assumption_of_its_file() -> None:
    number = validate_model(Part, {"bandwidth": "50 GB/s"}, "mine.yaml").bandwidth
    assert (number.value, number.kind, number.date) == (50e9, "assumed", "undated")
    assert number.source == "stated in mine.yaml"


def test_counts_are_whole() -> None:
    with pytest.raises(InputError, match="multiple of 1"):
        validate_model(Part, {"bandwidth": GOOD, "lanes": {**GOOD, "value": 7.5}}, "f.yaml")


def test_dumps_load_back() -> None:
    part = validate_model(Part, {"bandwidth": GOOD, "shares": {"x": {**GOOD, "value": "50 %"}}}, "f.yaml")
    assert Part.model_validate_json(part.model_dump_json()) == part
    assert Part(**part.model_dump()) == part
    assert part.model_dump(mode="json")["bandwidth"]["value"] == "50 GB/s"


def _is_quantity(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    if not isinstance(value, str):
        return True
    for dimension, table in DIMENSIONS.items():
        if "" not in table.units:
            try:
                parse_quantity(value, dimension)
            except InputError:
                continue
            return True
    return False


def unsourced(data: Any, path: str = "", sourced: bool = False) -> Iterator[str]:
    """Numbers and quantities that no enclosing mapping gives kind, source and date."""
    if isinstance(data, dict):
        sourced = sourced or {"kind", "source", "date"} <= data.keys()
        for key, item in data.items():
            if key not in ("date", "schema_version"):
                yield from unsourced(item, f"{path}.{key}", sourced)
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from unsourced(item, f"{path}.{index}", sourced)
    elif _is_quantity(data) and not sourced:
        yield path


def test_every_number_in_a_data_file_has_provenance() -> None:
    for path in (REPOSITORY / "hwmodels" / "data").glob("*/*.yaml"):
        text = path.read_text("utf-8")
        assert list(unsourced(parse_mapping(text, path.name))) == [], path
        assert "undated" not in text, path


def test_the_provenance_check_finds_what_it_looks_for() -> None:
    data = {"a": {"value": "50 GB/s", "kind": "spec", "source": "x"}, "b": [{"c": 3}], "d": GOOD, "e": "two"}
    assert list(unsourced(data)) == [".a.value", ".b.0.c"]


# -- shipped data -------------------------------------------------------------------------------------

REPOSITORY = Path(__file__).parents[2]
SHIPPED = sorted(
    path for folder in ("hwmodels", "simulator") for path in (REPOSITORY / folder / "data").rglob("*.yaml")
)
OWN = ("moesim calibrate", "moesim measurement", "own measurement", "benchmarks/", "lab/", "profile h200")
"""How the source of a measurement of this project begins or what it names."""
ELSEWHERE = ("@", "arXiv", "http", "datasheet", "docs.", ".com/", "README", "ISCA", "table")
"""What a source names that somebody else measured: a commit, a paper, a page."""


NUMBERS = {"value", "points", "fraction", "form"}
"""Keys of which an entry with a number has one; a description's own source has none."""


def numbers_in(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, entry) of everything with a kind and a source."""
    if isinstance(value, dict):
        if {"kind", "source"} <= set(value) and NUMBERS & set(value):
            yield path, value
        for key, item in value.items():
            yield from numbers_in(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers_in(item, f"{path}[{index}]")


@cache
def shipped_numbers() -> tuple[tuple[str, dict[str, Any]], ...]:
    found = [
        item
        for path in SHIPPED
        for item in numbers_in(parse_mapping(path.read_text(encoding="utf-8"), path.name), path.stem)
    ]
    assert len(found) > 1000
    return tuple(found)


def is_choice(entry: dict[str, Any]) -> bool:
    """A count or a price says what is described, 0 that nothing is: there is no value around them."""
    value = entry.get("value")
    return isinstance(value, int) or str(value).startswith("$") or str(value).split(" ")[0] == "0"


def test_every_assumed_number_that_ships_has_a_range() -> None:
    def ranged(entry: dict[str, Any]) -> bool:
        prior = entry.get("low", 1.0) < entry.get("fraction", 0.0) < entry.get("high", 0.0)
        return "between" in entry or prior or entry.get("residual", {}).get("relative", 0.0) > 0.0

    assumed = [(place, entry) for place, entry in shipped_numbers() if entry["kind"] == "assumed"]
    bare = [place for place, entry in assumed if not (ranged(entry) or is_choice(entry))]
    assert bare == []


def test_every_measured_number_that_ships_says_when_and_how() -> None:
    measured = [(place, e) for place, e in shipped_numbers() if e["kind"] == "measured"]
    assert len(measured) > 200
    for place, entry in measured:
        source, told = str(entry["source"]), str(entry)
        cells = [str(cell) for point in entry.get("points", []) for cell in point]
        made_up = ("half of", "assum", "extrapol", "template", "guess")  # a point may say what limited it
        assert not [cell for cell in cells if any(word in cell for word in made_up)], place
        assert str(entry.get("date", "undated")) != "undated", place
        if any(word in source for word in OWN):
            assert any(word in told for word in ("driver", "H200", "h200-8gpu", ".json")), place
        else:
            assert any(word in source for word in ELSEWHERE), (place, source)


def test_numbers_of_the_code_follow_the_same_rules() -> None:
    for number in (FRAMEWORK_BYTES, FSDP_SLACK, BUFFERS_SLACK, *REPLAY_ERRORS.values(), LOST_BESIDE_NCCL):
        assert number.range is not None
        assert number.kind in ("assumed", "published") or "driver 580" in number.source


@pytest.mark.parametrize(
    "ends", [[[0.1, 0.2]], [[0.1], [0.2]], [True, 1], [{"a": 1}, 2], ["0.1", "1e999"], [0.1, 5e-324]]
)
def test_ends_of_a_range_are_two_values(ends: object) -> None:
    data = {"value": 0.1, "kind": "assumed", "source": "a test", "date": "2024", "between": ends}
    with pytest.raises(InputError, match="between"):
        validate_model(SourcedFraction, data, "f.yaml")


@pytest.mark.parametrize("date", ["2024-02-30", "2024-1", "0000", "٢٠٢٤"])
def test_a_date_is_a_day_that_was(date: str) -> None:
    data = {"value": 0.1, "kind": "assumed", "source": "a test", "date": date}
    with pytest.raises(InputError, match="date"):
        validate_model(SourcedFraction, data, "f.yaml")


def test_results_that_sources_cite_are_packed_in_the_lab() -> None:
    """A source names a result by the path that it had on its day; `lab/results` holds it under its name."""
    texts = [path.read_text("utf-8") for path in SHIPPED]
    names = set(re.findall(r"benchmarks/gpu/results/([\w.-]+\.json)", "\n".join(texts)))
    assert len(names) >= 5
    assert [name for name in sorted(names) if not (REPOSITORY / "lab/results" / f"{name}.xz").is_file()] == []
