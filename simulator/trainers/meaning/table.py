"""The tables of arguments: what each one means, and the rows that explain them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

from msgspec import Struct
from msgspec.structs import asdict
from pydantic import Field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import Unknown, Value

Kind = Literal["key", "default", "base", "irrelevant", "not priced", "ignored"]
"""How an argument counts: it sets a scenario key, the trainer's default does so, the base does so, it changes
nothing, it has an effect that is not priced, or the user said that it is to be ignored."""


class MeaningRow(Struct, frozen=True):
    """One line of the summary. `place` is file and line; empty where the file does not say it."""

    argument: str
    value: str
    kind: Kind
    meaning: str
    place: str = ""

    def to_dict(self) -> dict[str, str]:
        """The row as plain data."""
        return asdict(self)


def shown(value: Any) -> str:
    """A value as one short text: words separated by blanks, long texts cut."""
    if value is None or value is True:
        return ""
    text = " ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


Status = Literal["used", "irrelevant", "not priced", "refused"]
TimeEffect = Literal["faster", "slower", "none", "unknown"]
MemoryEffect = Literal["less", "more", "none", "unknown"]

FILE = "data/trainers/megatron-arguments.yaml"


class ReasonGroup(Section):
    """Arguments that share a reason."""

    reason: str
    arguments: tuple[str, ...]


class UnpricedGroup(ReasonGroup):
    """Arguments whose effect on the real run is known by direction only."""

    time: TimeEffect
    memory: MemoryEffect


class _MeaningsFile(Section):
    """The keys of the data file."""

    used: tuple[str, ...]
    irrelevant: dict[str, ReasonGroup]
    not_priced: dict[str, UnpricedGroup]
    refused: dict[str, ReasonGroup]
    harmless: Annotated[dict[str, str], Field(default_factory=dict)]
    own: tuple[str, ...]
    without_value: dict[str, str | int]
    needs_value: tuple[str, ...]
    exclusive: tuple[tuple[str, str, str], ...]


class UnknownArgumentError(InputError):
    """An argument that no table has."""


class TableEntry(Struct, frozen=True):
    """What one argument means. `time` and `memory` compare the real run with the predicted one."""

    name: str
    status: Status
    group: str = ""
    reason: str = ""
    time: TimeEffect = "none"
    memory: MemoryEffect = "none"

    @property
    def direction(self) -> str:
        """The effect of an argument that is not priced, in words."""
        time = {"faster": "the real step is faster", "slower": "the real step is slower"}.get(self.time)
        memory = {"less": "it needs less memory", "more": "it needs more memory"}.get(self.memory)
        parts = [part for part in (time, memory) if part]
        if not parts:
            return "no effect" if self.time == self.memory == "none" else "the direction is unknown"
        return " and ".join(parts)


class Table(Struct, frozen=True):
    """All entries by name without dashes, and values with which an argument changes nothing (`harmless`).

    `own` are names that only other trainers have; `without_value` and `needs_value` say what None means.
    """

    entries: Mapping[str, TableEntry]
    harmless: Mapping[str, str]
    own: frozenset[str]
    without_value: Mapping[str, str | int]
    needs_value: frozenset[str]
    exclusive: tuple[tuple[str, str, str], ...]

    def entry(self, argument: str, place: str) -> TableEntry:
        """The entry of an argument such as `--num-layers`; abbreviations count where they are unique.

        Raises InputError for an unknown argument, with the nearest name, and for an ambiguous abbreviation.
        """
        name = argument.removeprefix("--")
        if name in self.entries:
            return self.entries[name]
        longer = sorted(other for other in self.entries if other.startswith(name)) if name else []
        if len(longer) == 1:
            return self.entries[longer[0]]
        if longer:
            few = ", ".join(f"--{other}" for other in longer[:4])
            more = f" and {len(longer) - 4} more" if len(longer) > 4 else ""
            raise InputError(
                f"{place}: {argument[:80]!r} is short for several arguments of Megatron-LM ({few}{more}); "
                "write the whole name"
            )
        hint = nearest(name, list(self.entries))
        raise UnknownArgumentError(
            f"{place}: {argument[:80]!r} is no argument that Megatron-LM knows{hint}; correct it, or give "
            f"--ignore {argument[:80]} if it changes neither time nor memory"
        )


def entries_of(
    irrelevant: Mapping[str, ReasonGroup], not_priced: Mapping[str, UnpricedGroup]
) -> list[TableEntry]:
    """Entries of groups of arguments that share a reason."""
    entries = [
        TableEntry(name, "irrelevant", group, part.reason)
        for group, part in irrelevant.items()
        for name in part.arguments
    ]
    for group, unpriced in not_priced.items():
        entries += [
            TableEntry(name, "not priced", group, unpriced.reason, unpriced.time, unpriced.memory)
            for name in unpriced.arguments
        ]
    return entries


@lru_cache(maxsize=1)
def megatron_table() -> Table:
    """The table of the shipped data file; raises InputError if an argument is listed twice."""
    text = (resources.files("moesim.simulator") / FILE).read_text("utf-8")
    data: dict[str, Any] = parse_mapping(text, FILE)
    read = validate_model(_MeaningsFile, data, FILE)
    entries = [TableEntry(name, "used") for name in read.used]
    entries += entries_of(read.irrelevant, read.not_priced)
    for group, part in read.refused.items():
        entries += [TableEntry(name, "refused", group, part.reason) for name in part.arguments]
    by_name: dict[str, TableEntry] = {}
    for entry in entries:
        if entry.name in by_name:
            raise InputError(f"{FILE}: {entry.name} is listed twice; keep one")
        by_name[entry.name] = entry
    own, needs_value = frozenset(read.own), frozenset(read.needs_value)
    return Table(by_name, read.harmless, own, read.without_value, needs_value, read.exclusive)


FORKS_FILE = "data/trainers/megatron-forks.yaml"


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


class Forks(Struct, frozen=True):
    """The table: meanings and entries by the argument without its dashes."""

    meanings: Mapping[str, _Meaning]
    entries: Mapping[str, TableEntry]
    local_kernels: frozenset[str]

    def means(self, name: str, value: Value | Unknown) -> list[tuple[str, Value | Unknown]] | None:
        """Arguments of Megatron-LM, with their values, that an argument stands for; None for others."""
        meaning = self.meanings.get(name)
        known = not isinstance(value, Unknown)
        text = str(value).strip("'\"") if known else ""  # some scripts leave quotes around it
        if meaning is None or (meaning.values and text not in meaning.values):
            return None
        first = value
        if known:
            first = meaning.values.get(text, value) if meaning.value is None else meaning.value
        more = meaning.also_with.get(text, {}) if known else {}
        return [(meaning.argument, first), *meaning.also.items(), *more.items()]


@lru_cache(maxsize=1)
def forks() -> Forks:
    """The table of the shipped data file."""
    text = (resources.files("moesim.simulator") / FORKS_FILE).read_text("utf-8")
    read = validate_model(_ForksFile, parse_mapping(text, FORKS_FILE), FORKS_FILE)
    entries = {entry.name: entry for entry in entries_of(read.irrelevant, read.not_priced)}
    return Forks(read.means, entries, frozenset(read.local_kernels))
