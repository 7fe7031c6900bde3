"""Arguments of older versions and of forks of Megatron-LM, in the words of its newest version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any

from pydantic import Field

from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import Unknown, Value
from moesim.simulator.trainers.meaning.table import ReasonGroup, TableEntry, UnpricedGroup, entries_of

FILE = "data/trainers/megatron-forks.yaml"


class _Meaning(Section):
    """What one argument says in the words of Megatron-LM."""

    argument: str
    value: str | bool | None = None
    values: Annotated[dict[str, Any], Field(default_factory=dict)]
    also: Annotated[dict[str, Any], Field(default_factory=dict)]
    also_with: Annotated[dict[str, dict[str, Any]], Field(default_factory=dict)]


class _ForksFile(Section):
    """The keys of the data file."""

    means: dict[str, _Meaning]
    local_kernels: tuple[str, ...]
    irrelevant: dict[str, ReasonGroup]
    not_priced: dict[str, UnpricedGroup]


@dataclass(frozen=True, slots=True)
class Forks:
    """The table: meanings and entries by the argument without its dashes."""

    meanings: Mapping[str, _Meaning]
    entries: Mapping[str, TableEntry]
    local_kernels: frozenset[str]

    def means(self, name: str, value: Value | Unknown) -> Iterator[tuple[str, Value | Unknown]] | None:
        """Arguments of Megatron-LM, with their values, that an argument stands for; None for others."""
        meaning = self.meanings.get(name)
        if meaning is None or (meaning.values and _plain(value) not in meaning.values):
            return None
        return _of(meaning, value)


def _of(meaning: _Meaning, value: Value | Unknown) -> Iterator[tuple[str, Value | Unknown]]:
    known = not isinstance(value, Unknown)
    text = _plain(value)
    if known and meaning.value is not None:
        yield meaning.argument, meaning.value
    else:
        yield meaning.argument, meaning.values.get(text, value) if known else value
    yield from meaning.also.items()
    if known:
        yield from meaning.also_with.get(text, {}).items()


def _plain(value: Value | Unknown) -> str:
    """The text of a value without the quotes that some scripts leave around it."""
    return "" if isinstance(value, Unknown) else str(value).strip("'\"")


@lru_cache(maxsize=1)
def forks() -> Forks:
    """The table of the shipped data file."""
    text = (resources.files("moesim.simulator") / FILE).read_text("utf-8")
    read = validate_model(_ForksFile, parse_mapping(text, FILE), FILE)
    entries = {entry.name: entry for entry in entries_of(read.irrelevant, read.not_priced)}
    return Forks(read.means, entries, frozenset(read.local_kernels))
