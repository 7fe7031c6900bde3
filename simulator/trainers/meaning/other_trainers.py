"""Reads the names of Megatron-Bridge, NeMo, torchtitan and DeepSpeed as arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import Argument, Launch, Unknown, Value
from moesim.simulator.trainers.meaning.given import MOST_ARGUMENTS, Stated, row_of, shown_value
from moesim.simulator.trainers.meaning.rows import Row
from moesim.simulator.trainers.meaning.table import Entry, Table

FILE = "data/trainers/names.yaml"

NAMED_TRAINERS = ("megatron-bridge", "nemo", "torchtitan", "deepspeed")
"""Trainers whose files have names of their own; what such a file does not state is the base's."""

OWN = (
    "zero-stage", "local-batch-size", "pipeline-microbatch-size", "recompute-policy", "schedule",
    "gradient-accumulation-steps",
)  # fmt: skip
"""Arguments that Megatron-LM does not have, and that names of other trainers stand for."""


class _Name(Section):
    """The argument of Megatron-LM that a name stands for."""

    argument: str
    opposite: bool = False
    values: Annotated[dict[str, Any], Field(default_factory=dict)]


def _short(value: object) -> object:
    return {"argument": value} if isinstance(value, str) else value


class _Trainer(Section):
    """Names of one trainer."""

    like_megatron: tuple[str, ...]
    arguments: dict[str, Annotated[_Name, BeforeValidator(_short)]]
    irrelevant: dict[str, str]
    not_priced: dict[str, str]


class _File(Section):
    """All trainers by name."""

    trainers: dict[str, _Trainer]


@lru_cache(maxsize=1)
def _names() -> Mapping[str, _Trainer]:
    text = (resources.files("moesim.simulator") / FILE).read_text("utf-8")
    return validate_model(_File, {"trainers": parse_mapping(text, FILE)}, FILE).trainers


def translate(
    launch: Launch, table: Table, ignore: Collection[str] = ()
) -> tuple[dict[str, Stated], list[Row]]:
    """Arguments by Megatron-LM's names, and rows on what is irrelevant or not priced.

    Raises InputError for a name that is not known, with the nearest, and for refused arguments.
    """
    if len(launch.arguments) > MOST_ARGUMENTS:
        raise InputError(f"the file has more than {MOST_ARGUMENTS} names")
    trainer = _names()[str(launch.trainer)]
    stated: dict[str, Stated] = {}
    rows: list[Row] = []
    for argument in launch.arguments:
        if argument.name in ignore:
            value = shown_value(argument.value)
            rows.append(Row(argument.name, value, "ignored", "you said so", argument.place))
            continue
        one, row = _read(argument, trainer, table)
        if row is not None:
            rows.append(row)
        if one is not None:
            before = stated.get(one.entry.name)
            if before is not None and before.value != one.value:
                text = f"the same as {one.written} in {one.place}, and the last counts"
                rows.append(Row(before.written, shown_value(before.value), "ignored", text, before.place))
            stated[one.entry.name] = one
    return stated, rows + [row for one in stated.values() for row in row_of(one, table)]


def _read(argument: Argument, trainer: _Trainer, table: Table) -> tuple[Stated | None, Row | None]:
    name, value = argument.name.removeprefix("+"), argument.value
    text = shown_value(value)
    if name.startswith("--"):
        entry = table.entry(name, argument.place)
        return Stated(argument.name, value, argument.place, entry), None
    known = trainer.arguments.get(name)
    if known is not None:
        found = _value(known, value)
        if found is None or text in ("auto", ""):
            reason = "the file leaves it open, so the base's counts"
            return None, Row(argument.name, text, "base", reason, argument.place)
        entry = _entry(known.argument, table)
        return Stated(argument.name, found, argument.place, entry), None
    alike = _like_megatron(name, trainer, table)
    if alike is not None and value is not None:
        return Stated(argument.name, value, argument.place, alike), None
    for section in _sections(name):
        if section in trainer.irrelevant:
            return None, Row(argument.name, text, "irrelevant", trainer.irrelevant[section], argument.place)
        if section in trainer.not_priced:
            reason = f"the direction is unknown: {trainer.not_priced[section]}"
            return None, Row(argument.name, text, "not priced", reason, argument.place)
    if value is None:
        reason = "the file leaves it open, so the base's counts"
        return None, Row(argument.name, text, "base", reason, argument.place)
    hint = nearest(name, list(trainer.arguments))
    raise InputError(
        f"{argument.place}: {name[:80]!r} is not known{hint}; correct it, or give --ignore {name[:80]} if it "
        "changes neither time nor memory"
    )


def _entry(name: str, table: Table) -> Entry:
    return Entry(name, "used") if name in OWN else table.entries[name]


def _value(known: _Name, value: Value | Unknown) -> Value | Unknown:
    """The value as Megatron-LM's argument has it; None where the file leaves it open."""
    if isinstance(value, Unknown) or value is None:
        return value
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if known.values:
        changed: Value = known.values.get(text, known.values.get("*", value))
        return changed
    if known.opposite:
        return text.lower() not in ("true", "1")
    return value


def _like_megatron(name: str, trainer: _Trainer, table: Table) -> Entry | None:
    section, dot, last = name.rpartition(".")
    if not dot or section not in trainer.like_megatron:
        return None
    return table.entries.get(last.replace("_", "-"))


def _sections(name: str) -> Iterator[str]:
    """The name itself and the sections that hold it, the narrowest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
