"""Pairs the words of a command line into arguments, with the place where each is written."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from moesim.simulator.trainers.launch import Argument, Unknown, Value
from moesim.simulator.trainers.reading.script_record import Command, ScriptRecord
from moesim.simulator.trainers.reading.unknowns import Choice, Unknowns

_FLAG = re.compile(r"(?:--?[A-Za-z]|--(?=\ue000))[\w.+\ue000\ue001-]*(\[[^\]=]*\])?(=.*)?", re.DOTALL)
_PAIR = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_TOKEN = re.compile(r"(?<![\w-])(--?[A-Za-z][\w.-]*)|(?:^|[\s\"'(])(?:\+{0,2})([A-Za-z_][\w.@/-]*)=")
_MOST_NESTED = 5
_OPTIONAL = re.compile(r"args|opts|option|flag|extra|config|param|cmd", re.IGNORECASE)


def arguments_of(words: Iterable[str], command: Command, reading: ScriptRecord) -> tuple[Argument, ...]:
    """The arguments of a program from its words, in order.

    A flag takes the words up to the next flag: `--flag` alone has the value None, several words are a tuple.
    `key=value` words are arguments of their own. Words before the first flag have the name "". A part that a
    condition decides becomes an Unknown for each flag of its alternatives.
    """
    unknowns = reading.unknowns
    pairs: list[tuple[str, list[str | Unknown]]] = []
    is_open = False
    for word in words:
        entry = unknowns.entry(word)
        if isinstance(entry, Choice) and (_is_list(entry, unknowns) or not is_open):
            pairs += _optional(entry, unknowns)
            is_open = False
        elif isinstance(entry, Unknown) and _is_optional(entry, is_open):
            pairs.append(("", [entry]))
            is_open = False
        elif _FLAG.fullmatch(word) and not re.fullmatch(r"-[eE]\d+", word):
            name, equals, value = word.partition("=")
            pairs.append((unknowns.shown(name), [unknowns.value(value)] if equals else []))
            is_open = not equals
        elif match := _PAIR.fullmatch(word):
            pairs.append((("~" if match[1] == "~" else "") + match[2], [unknowns.value(match[3])]))
            is_open = False
        elif word == "--":
            pairs.append(("--", []))
            is_open = False
        elif is_open:
            pairs[-1][1].append(unknowns.value(word))
        elif re.fullmatch(r"~[A-Za-z_][\w.@/-]*", word):
            pairs.append((word, []))
        else:
            pairs.append(("", [unknowns.value(word)]))
    places = _Places(command, reading)
    places.count(name for name, _ in pairs)
    return tuple(Argument(name, _joined(values), places.of(name, _first(values))) for name, values in pairs)


def _first(values: list[str | Unknown]) -> str:
    if not values:
        return ""
    return (values[0].text if isinstance(values[0], Unknown) else values[0])[:200]


def _is_list(entry: Choice, unknowns: Unknowns, depth: int = 0) -> bool:
    """Whether a choice is about whole arguments, so that it does not belong to the flag before it."""
    if any(len(option) != 1 for option in entry.alternatives):
        return True
    words = [word for option in entry.alternatives for text in option for word in text.split()[:1]]
    for word in words:
        inner = unknowns.entry(word)
        if isinstance(inner, Choice) and depth < _MOST_NESTED and _is_list(inner, unknowns, depth + 1):
            return True
        if inner is None and (_FLAG.fullmatch(word) or _PAIR.fullmatch(word)):
            return True
    return False


def _is_optional(entry: Unknown, is_open: bool) -> bool:
    return (bool(_OPTIONAL.search(entry.text)) and entry.text.startswith("$")) or not is_open


def _optional(entry: Choice, unknowns: Unknowns, depth: int = 0) -> list[tuple[str, list[str | Unknown]]]:
    """One unknown argument for each flag that some alternative holds, with the values that it may have."""
    by_name: dict[str, dict[str, None]] = {}
    nested: list[tuple[str, list[str | Unknown]]] = []
    holders: dict[str, set[int]] = defaultdict(set)
    for n, option in enumerate(entry.alternatives):
        name, value = "", ""
        for word in [word for text in option for word in text.split()]:
            inner = unknowns.entry(word)
            if isinstance(inner, Choice) and _is_list(inner, unknowns):
                nested += _optional(inner, unknowns, depth + 1) if depth < _MOST_NESTED else []
                name, value = "", ""
                continue
            if _FLAG.fullmatch(word):
                name, value = unknowns.shown(word.partition("=")[0]), unknowns.shown(word)
            elif match := _PAIR.fullmatch(word):
                name, value = match[2], unknowns.shown(word)
            else:
                by_name.get(name, {}).pop(value, None)
                value = f"{value} {unknowns.shown(word)}".strip()
            by_name.setdefault(name, {})[value] = None
            holders[name].add(n)
    reason = f"depends on {entry.condition}"
    every = len(entry.alternatives)
    pairs: list[tuple[str, list[str | Unknown]]] = []
    for name, texts in by_name.items():
        shown = " or ".join([*texts, *(["nothing"] if len(holders[name]) < every else [])])
        pairs.append((name, [Unknown(shown, reason)]))
    return pairs + nested


def _joined(values: list[str | Unknown]) -> Value | Unknown:
    """The value of an argument from its words; one unknown word makes the whole value unknown."""
    unknown = next((value for value in values if isinstance(value, Unknown)), None)
    if unknown is not None:
        text = " ".join(value.text if isinstance(value, Unknown) else value for value in values)
        return Unknown(text, unknown.reason)
    known = [value for value in values if isinstance(value, str)]
    return None if not known else known[0] if len(known) == 1 else tuple(known)


class _Places:
    """Finds the lines on which the arguments of a command are written, among the statements before it."""

    def __init__(self, command: Command, reading: ScriptRecord) -> None:
        self._lines: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._left: dict[str, int] = defaultdict(int)
        self._command = command
        seen = set()
        for file, first, text in reading.followed[: command.followed]:
            if (file, first, text) in seen:
                continue
            seen.add((file, first, text))
            for number, line in enumerate(text.splitlines(), start=first):
                if not line.lstrip().startswith("#"):
                    for match in _TOKEN.finditer(line):
                        self._lines[match[1] or match[2]].append((f"{file}, line {number}", line))

    def count(self, names: Iterable[str]) -> None:
        """Take note of the arguments whose places will be asked for."""
        for name in names:
            self._left[name] += 1

    def of(self, name: str, value: str) -> str:
        """The place of the next argument of this name; of several, one whose line holds the value as well."""
        lines = self._lines.get(name.removeprefix("~"), [])
        exact = [
            line for line in lines if value and re.search(rf"(?<![\w-]){re.escape(value)}(?!\w)", line[1])
        ]
        left = self._left[name]
        self._left[name] -= 1
        if left == 1 and exact:
            return exact[-1][0]
        return lines[max(0, len(lines) - left)][0] if lines else self._command.place
