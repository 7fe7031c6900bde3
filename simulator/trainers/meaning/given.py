"""The arguments that a file states, with typed access, and those that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.trainers.launch import Unknown, Value
from moesim.simulator.trainers.meaning.table import (
    Kind,
    MeaningRow,
    Table,
    TableEntry,
    megatron_table,
    shown,
)

_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w{0,60})")
_NUMBER = re.compile(r"-?\d{0,20}\.?\d{0,20}([eE][+-]?\d{1,2})?")
_OFF = {"false", "0", "off", "no", "none", "null"}


class StatedArgument(Struct, frozen=True):
    """An argument that the file states: as it is written, with its value, its place and its table entry.

    `text` is the value as the file writes it, where a table of names changed it; `is_default` says that the
    trainer's default stands for an argument that the file does not state.
    """

    written: str
    value: Value | Unknown
    place: str
    entry: TableEntry
    text: str | None = None
    is_default: bool = False


class Given:
    """The stated arguments, and the keys and rows that grow as they are given a meaning.

    `in_part` says that the file states a part of the arguments, and that the base has all others; else what
    it does not state has Megatron-LM's default.
    """

    def __init__(
        self, stated: Mapping[str, StatedArgument], rows: Sequence[MeaningRow], in_part: bool = False
    ) -> None:
        """Start from the stated arguments and the rows on those that are not used."""
        self.stated = dict(stated)
        self.keys: dict[str, Any] = {}
        self.rows = list(rows)
        self.in_part = in_part
        self._explained: set[str] = set()

    def has(self, *names: str) -> bool:
        """Whether the file states any of the arguments."""
        return any(name in self.stated for name in names)

    def place(self, name: str) -> str:
        """Argument and place, for messages."""
        stated = self.stated[name]
        return f"{stated.place}: {stated.written} {shown_value(stated.value)}".rstrip()

    def value(self, name: str) -> Value:
        """The value of a stated argument; raises InputError with a remedy for one that has no value."""
        stated = self.stated[name]
        if not isinstance(stated.value, Unknown):
            return stated.value
        raise InputError(unknown_value(stated.written, stated.value, stated.place))

    def flag(self, name: str) -> bool:
        """Whether a flag is stated; the value false switches it off again."""
        if name not in self.stated:
            return False
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return value is not False
        if str(value).lower() in _OFF:
            return False
        if str(value).lower() in ("true", "1", "on", "yes"):
            return True
        raise InputError(f"{self.place(name)}: is a flag without a value; leave the value out")

    def integer(self, name: str, default: int, least: int = 1, most: int = 10**10) -> int:
        """A whole number within limits, or the default where the argument is not stated."""
        if name not in self.stated:
            return default
        value = self.value(name)
        text = str(value)
        if isinstance(value, bool) or not re.fullmatch(r"-?\d{1,12}", text):
            raise InputError(f"{self.place(name)}: is not a whole number; write one from {least} on")
        if not least <= int(text) <= most:
            raise InputError(f"{self.place(name)}: is outside the limits {least} to {most}")
        return int(text)

    def number(self, name: str, default: float) -> float:
        """A finite number, or the default where the argument is not stated."""
        if name not in self.stated:
            return default
        value = self.value(name)
        try:
            if not isinstance(value, bool) and _NUMBER.fullmatch(str(value)):
                return float(str(value))
        except ValueError:
            pass
        raise InputError(f"{self.place(name)}: is not a number")

    def text(self, name: str, default: str, choices: Collection[str] = ()) -> str:
        """A text, one of `choices` if there are any, or the default where the argument is not stated."""
        if name not in self.stated:
            return default
        value = self.value(name)
        known = f"; one of {', '.join(choices)}" if choices else ""
        if value is None or isinstance(value, tuple | bool):
            raise InputError(f"{self.place(name)}: needs one value{known}")
        if choices and str(value) not in choices:
            hint = nearest(str(value), list(choices))
            raise InputError(f"{self.place(name)}: {str(value)[:60]!r} is not known{hint}{known}")
        return str(value)

    def words(self, name: str) -> tuple[str, ...]:
        """The words of a value, split at blanks and commas; none where the argument is not stated."""
        if name not in self.stated:
            return ()
        value = self.value(name)
        parts = value if isinstance(value, tuple) else () if value is None else (value,)
        return tuple(word for part in parts for word in re.split(r"[\s,]+", str(part).strip("[]")) if word)

    # -- results -------------------------------------------------------------------------------------

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a scenario key, and explain it by the stated ones among the arguments `names`.

        Where the file states none of them, the row says whose value counts.
        """
        self.keys[key] = value
        stated = [name for name in names if name in self.stated]
        meaning = f"{key} = {_written(value)}" + (f" ({note})" if note else "")
        for name in stated:
            self.explain(name, "key", meaning)
        if not stated:
            kind: Kind = "base" if self.in_part else "default"
            text = meaning if self.in_part else f"{meaning}; Megatron-LM's default"
            self.rows.append(MeaningRow(_dashed(names[0]), "", kind, text))

    def explain(self, name: str, kind: Kind, meaning: str) -> None:
        """Add a row for an argument, stated or not."""
        stated = self.stated.get(name)
        self._explained.add(name)
        if stated is None:
            self.rows.append(MeaningRow(_dashed(name), "", kind, meaning))
        else:
            text = shown_value(stated.value) if stated.text is None else stated.text
            kind = "default" if stated.is_default and kind == "key" else kind
            self.rows.append(MeaningRow(stated.written, text, kind, meaning, stated.place))

    def explain_rest(self) -> None:
        """Add a row for each used argument that is stated and has none yet."""
        text = "changes nothing here beside the other arguments of the file"
        for name, stated in self.stated.items():
            if stated.entry.status == "used" and name not in self._explained:
                self.explain(name, "irrelevant", text)


def unknown_value(written: str, value: Unknown, place: str) -> str:
    """The message for an argument that matters and has no value, with a remedy."""
    variable = _VARIABLE.search(value.text)
    remedy = f"give --env {variable[1]}=VALUE" if variable else "write the value into the file"
    return f"{place}: {written} {value.text[:80]}: has no value: {value.reason}; {remedy}"


def shown_value(value: Value | Unknown) -> str:
    """A value as one short text, also where it is unknown."""
    return shown(value.text if isinstance(value, Unknown) else value)


def row_of(stated: StatedArgument, table: Table) -> list[MeaningRow]:
    """Rows of an argument that is not used; raises InputError for one that is refused."""
    entry, value = stated.entry, shown_value(stated.value)
    if entry.status == "used":
        return []
    kind: Kind = "irrelevant"
    if stated.value is False or table.harmless.get(entry.name) == value:
        text = "changes nothing with this value"
    elif entry.status == "refused":
        raise InputError(f"{stated.place}: {stated.written} {value}: {entry.reason}".replace(" :", ":"))
    elif entry.status == "irrelevant" or entry.direction == "no effect":
        text = entry.reason
    else:
        kind, text = "not priced", f"{entry.direction}: {entry.reason}"
    return [MeaningRow(stated.written, value, kind, text, stated.place)]


def _dashed(name: str) -> str:
    return name if name.startswith("--") or "." in name else f"--{name}"


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        text = ", ".join(map(_written, value))
        return f"[{text if len(text) < 100 else text[:97] + '...'}]"
    return str(value)


LAYOUT = "pipeline-model-parallel-layout"
LAYERS = "num-layers-per-virtual-pipeline-stage"
STAGES = "num-virtual-stages-per-pipeline-rank"
FIRST = "decoder-first-pipeline-num-layers"
LAST = "decoder-last-pipeline-num-layers"


def check_contradictions(given: Given) -> None:
    """Raise InputError for arguments that contradict each other, and for ones that need another."""
    on = {name for name, stated in given.stated.items() if stated.value is not False}
    pairs = [
        pair
        for pair in megatron_table().exclusive
        if {*pair[:2]} <= on and not (given.in_part and pair[:2] == (STAGES, LAYOUT))  # Bridge states both
    ]
    activations, granularity = "recompute-activations", "recompute-granularity"
    if not pairs and activations in on and given.text(granularity, "selective") != "selective":
        pairs = [(activations, granularity, "the former means selective granularity")]
    for one, other, reason in pairs:
        raise InputError(
            f"{given.place(one)} and {given.place(other)} contradict each other: {reason}; keep one of them"
        )
    if given.has("recompute-method") and given.text("recompute-granularity", "none") != "full":
        raise InputError(
            f"{given.place('recompute-method')}: the method belongs to --recompute-granularity full; "
            "state it, or leave the method out"
        )
    needs = {"overlap-param-gather": "overlap-grad-reduce", "tp-comm-overlap": "sequence-parallel"}
    for flag, needed in needs.items():
        if given.flag(flag) and not given.flag(needed) and not given.in_part:
            raise InputError(f"{given.place(flag)}: needs --{needed} too; add it")
