"""Compares predictions with published measurements, which are data files of the package."""

from __future__ import annotations

import csv
import io
from importlib import resources
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping

Data = TypeVar("Data", bound=BaseModel)


def published_text(name: str) -> str:
    """A file of `data/published`."""
    return resources.files("moesim.simulator").joinpath("data", "published", name).read_text("utf-8")


def published_data(cls: type[Data], name: str) -> Data:
    """A YAML file of `data/published` as a model; raises InputError for a malformed one."""
    return validate_model(cls, parse_mapping(published_text(name), name), name)


def published_records(name: str) -> list[dict[str, str]]:
    """The lines of a table of `data/published`."""
    return list(csv.DictReader(io.StringIO(published_text(name))))


MOST_BYTES = 16 << 20


def file_records(file: Path) -> list[dict[str, str]]:
    """The lines of the user's own table (CSV with a header). Raises InputError for a file that is none."""
    reader = csv.DictReader(io.StringIO(read_text(file, MOST_BYTES, "table of measurements")), strict=True)
    try:
        records = list(reader)
    except csv.Error as error:
        raise InputError(f"{file.name}:{reader.line_num}: not CSV ({error})") from None
    if not records:
        raise InputError(f"{file.name}: no row below the header; a table of measurements has one line a run")
    ragged = next((n for n, record in enumerate(records, 2) if None in record or None in record.values()), 0)
    if ragged:
        raise InputError(f"{file.name}: row {ragged - 1} has another number of cells than the header")
    return records
