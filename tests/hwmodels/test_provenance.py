from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import (
    ProvenanceRow,
    SourcedBytesPerSecond,
    SourcedCount,
    SourcedFraction,
    provenance_rows,
)
from moesim.hwmodels.units import DIMENSIONS, parse_quantity
from moesim.hwmodels.yaml_io import parse_mapping, validate_model

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
        ({"source": ""}, "source"),
        ({"source": "   "}, "source"),
        ({"kind": "guessed"}, "spec, measured, published, derived, assumed"),
        ({"date": "last year"}, "date"),
        ({"value": 50}, "bare number"),
        ({"value": "50 GB"}, "a bandwidth"),
        ({"unit": "GB/s"}, "unknown key"),
    ],
)
def test_incomplete_provenance_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate_model(Part, {"bandwidth": {**GOOD, **change}}, "f.yaml")


@pytest.mark.parametrize("written", ["2024", "2024-12", "2024-12-01"])
def test_unquoted_dates_are_texts(written: str) -> None:
    text = f"bandwidth: {{value: 1 GB/s, kind: spec, source: a sheet, date: {written}}}"
    assert validate_model(Part, parse_mapping(text, "f.yaml"), "f.yaml").bandwidth.date == written


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


def _data_files() -> list[str]:
    root = files("moesim.hwmodels").joinpath("data")
    return sorted(
        f"{folder.name}/{file.name}"
        for folder in root.iterdir()
        for file in folder.iterdir()
        if file.name.endswith((".yaml", ".json"))
    )


@pytest.mark.parametrize("name", _data_files())
def test_every_number_in_a_data_file_has_provenance(name: str) -> None:
    text = files("moesim.hwmodels").joinpath("data", *name.split("/")).read_text("utf-8")
    data = parse_mapping(text, name)
    assert list(unsourced(data)) == []
    assert "undated" not in text
    assert any(_is_quantity(item) for item in _leaves(data)) or name == "networks/single-node.yaml"


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict | list):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _leaves(item)
    else:
        yield data


def test_the_provenance_check_finds_what_it_looks_for() -> None:
    data = {"a": {"value": "50 GB/s", "kind": "spec", "source": "x"}, "b": [{"c": 3}], "d": GOOD, "e": "two"}
    assert list(unsourced(data)) == [".a.value", ".b.0.c"]


@pytest.mark.parametrize(
    "ends", [[[0.1, 0.2]], [[0.1], [0.2]], [True, 1], [{"a": 1}, 2], ["0.1", "1e999"], [0.1, 5e-324]]
)
def test_ends_of_a_range_are_two_values(ends: object) -> None:
    data = {"value": 0.1, "kind": "assumed", "source": "a test", "date": "2024", "between": ends}
    with pytest.raises(InputError, match="between"):
        validate_model(SourcedFraction, data, "f.yaml")


@pytest.mark.parametrize("date", ["2024-13", "2024-02-30", "2024-1", "0000", "٢٠٢٤"])
def test_a_date_is_a_day_that_was(date: str) -> None:
    data = {"value": 0.1, "kind": "assumed", "source": "a test", "date": date}
    with pytest.raises(InputError, match="date"):
        validate_model(SourcedFraction, data, "f.yaml")
