"""Compares predictions with published measurements, which are data files of the package."""

from __future__ import annotations

import csv
import io
from collections import Counter
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
    """The lines of the user's own table (CSV with a header; also with semicolons or tabs between cells).

    Lines without a cell are passed over. Raises InputError for a file that is no such table.
    """
    text = read_text(file, MOST_BYTES, "table of measurements")
    header = text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text), strict=True, delimiter=max(",;\t", key=header.count))
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise InputError(f"{file.name}:{reader.line_num}: not CSV ({error})") from None
    names = [name.strip() for name in lines[0][1]]
    while names and not names[-1]:
        names.pop()
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        raise InputError(
            f"{file.name}: two columns are called {twice!r}; every column needs a name of its own"
        )
    if len(lines) == 1:
        raise InputError(f"{file.name}: no row below the header; a table of measurements has one line a run")
    for line, cells in lines[1:]:
        if len(cells) < len(names) or any(cell.strip() for cell in cells[len(names) :]):
            raise InputError(
                f"{file.name}:{line}: row {line - 1} has another number of cells than the header "
                f"({len(cells)}, not {len(names)})"
            )
    return [dict(zip(names, cells, strict=False)) for _, cells in lines[1:]]
