"""Compares predictions with published measurements, which are data files of the package."""

from __future__ import annotations

import csv
import io
from importlib import resources
from typing import TypeVar

from pydantic import BaseModel

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
