"""Reads the words and numbers of others' tables of measured steps, by the table `spellings.yaml`.

What is spelled otherwise becomes the word of `open-rows.csv`; what is unknown stays as it is, with the
reason.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from pydantic import Field

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest
from moesim.simulator.model.recompute import MODULES
from moesim.simulator.scoring import published_data

FILE = "spellings.yaml"
LONGEST = 6
"""Most words of a phrase."""
MOST_CHARACTERS = 200
"""Longest cell of words that is read."""


class Meaning(Frozen):
    """The word of `open-rows.csv` for a set of words, and a note for every row that is read so."""

    is_: str = Field(alias="is")
    says: str = ""


class MetricUnit(Frozen):
    """Metric of a unit: the published value `times` a factor, inverted or divided over all GPUs."""

    is_: str = Field(alias="is")
    times: float = 1.0
    times_sequence: bool = False
    inverse: bool = False
    over: str = ""


class Vocabulary(Frozen):
    """The words of one column (`spellings.yaml` says how they are read)."""

    as_is: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, ...]]
    means: Mapping[str, str | Meaning] = Field(default_factory=dict)
    units: Mapping[str, MetricUnit] = Field(default_factory=dict)
    other: Mapping[str, str] = Field(default_factory=dict)

    @property
    def phrases(self) -> dict[str, str]:
        """Meaning of every phrase; "" for those that are passed over."""
        spelt = {plain(phrase): word for word, phrases in self.words.items() for phrase in phrases}
        return {plain(phrase): "" for phrase in self.ignored} | spelt


class ModelNames(Frozen):
    """Names of models: words that change no shape, beginnings and whole names."""

    ignored: tuple[str, ...]
    begins: dict[str, str]
    same: dict[str, tuple[str, ...]]


class Spellings(Frozen):
    """The file `spellings.yaml`."""

    columns: dict[str, tuple[str, ...]]
    degrees: dict[str, tuple[str, ...]]
    hardware: Vocabulary
    precision: Vocabulary
    recompute: Vocabulary
    schedule: Vocabulary
    zero_or_fsdp: Vocabulary
    metric: Vocabulary
    model: ModelNames


@lru_cache(maxsize=1)
def spellings() -> Spellings:
    """The table of spellings."""
    return published_data(Spellings, FILE)


@lru_cache(maxsize=8)
def _phrases(column: str) -> Mapping[str, str]:
    vocabulary: Vocabulary = getattr(spellings(), column)
    return vocabulary.phrases


class Read(NamedTuple):
    """A cell by the table: its word, notes for the row, and why it cannot be read ("" where it can)."""

    word: str
    notes: tuple[str, ...] = ()
    problem: str = ""


def plain(text: str) -> str:
    """Words of a text in lower case, with one blank between them."""
    return " ".join(re.findall(r"[a-z0-9.%#]+", _folded(text))).strip(" .")


def _folded(text: str) -> str:
    """A text in lower case, with plain letters for their variants and "x" for the sign of a product."""
    return unicodedata.normalize("NFKC", text).casefold().replace("\u00d7", "x").replace("\u2212", "-")


def pieces(column: str, text: str) -> tuple[list[str], list[str]]:
    """(meanings of the phrases of a text in order, words that no phrase holds), longest phrases first."""
    phrases, words = _phrases(column), plain(text).split()
    found: list[str] = []
    unknown: list[str] = []
    at = 0
    while at < len(words):
        for length in range(min(LONGEST, len(words) - at), 0, -1):
            phrase = " ".join(words[at : at + length])
            if phrase in phrases:
                found += [phrases[phrase]] if phrases[phrase] else []
                at += length
                break
        else:
            unknown.append(words[at])
            at += 1
    return found, unknown


def read_word(column: str, text: str) -> Read:
    """The word of `open-rows.csv` that a cell of `column` means; an unknown one stays, with the reason."""
    vocabulary: Vocabulary = getattr(spellings(), column)
    text = text.strip()
    for known in ("", *vocabulary.as_is, *legal_words(vocabulary)):
        if text.casefold() == known.casefold():
            return Read(known)
    if len(text) > MOST_CHARACTERS:
        return Read(text, (), f"{column}: {len(text)} characters, where at most {MOST_CHARACTERS} are read")
    cut = re.sub(r"(?<![\w.])\d+ ?x ?(?=[a-z])", "", _folded(text)) if column == "hardware" else text
    found, unknown = pieces(column, cut)
    modules = [word for word in found if word in MODULES] if column == "recompute" else []
    if not unknown and modules and {*found} <= {*MODULES, "selective"}:
        return Read(f"selective ({', '.join(m for m in MODULES if m in modules)})")
    meaning = _meanings(column).get(frozenset(found))
    if meaning is None or unknown:
        return Read(text, (), _unknown(column, text, unknown, meaning))
    if isinstance(meaning, str):
        return Read(meaning)
    return Read(meaning.is_, (meaning.says,) if meaning.says else ())


def legal_words(vocabulary: Vocabulary) -> list[str]:
    """The words of `open-rows.csv` that a vocabulary leads to, each once."""
    found = dict.fromkeys(m if isinstance(m, str) else m.is_ for m in vocabulary.means.values())
    return [word for word in found if word]


@lru_cache(maxsize=8)
def _meanings(column: str) -> Mapping[frozenset[str], str | Meaning]:
    vocabulary: Vocabulary = getattr(spellings(), column)
    return {frozenset(words.split()): meaning for words, meaning in vocabulary.means.items()}


def _unknown(column: str, text: str, unknown: list[str], meaning: str | Meaning | None) -> str:
    legal = legal_words(getattr(spellings(), column))
    if column == "recompute":
        legal.append(f"selective ({', '.join(MODULES)})")
    rest = meaning.is_ if isinstance(meaning, Meaning) else meaning
    near = f" (nearest: {rest!r})" if rest else nearest(text, legal)
    which = f" for {' '.join(unknown)!r}" if unknown and meaning else ""
    return f"{column}={text!r} is not known{which}{near}; known: {', '.join(legal)}"


def column_of(header: str) -> str:
    """Column of `open-rows.csv` for a header of others' tables; the header itself where none is known."""
    return _headers().get(plain(header), header.strip())


@lru_cache(maxsize=1)
def _headers() -> Mapping[str, str]:
    own = {plain(column): column for column in spellings().columns}
    return {plain(h): column for column, others in spellings().columns.items() for h in others} | own


# -- degrees of parallelism -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _degree_patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    pairs = [(name, plain(spelt)) for name, phrases in spellings().degrees.items() for spelt in phrases]
    pairs.sort(key=lambda pair: -len(pair[1]))
    out = []
    for name, spelt in pairs:
        words = spelt.replace(" ", r"[ _(-]*")
        # "fsdp2" and "zero1" are words; "tp8" is a degree, and so is "fsdp=2".
        between = (
            r" ?[=:( ] ?" if name in ("shard", "replicate", "hybrid", "optimizer") else r"[ _-]?[=:(]? ?"
        )
        more = r"(?: ?[x*,] ?(\d+))?" if name == "hybrid" else ""
        out.append((name, re.compile(rf"(?<![a-z0-9]){words}{between}(-1|\d+){more}(?![a-z0-9.])\)?")))
    return tuple(out)


def degrees_of(text: str) -> tuple[dict[str, int], str]:
    """Degrees that a cell states, such as "TP=8, PP4", and the rest of its words."""
    rest = _folded(text)
    found: dict[str, int] = {}
    for name, pattern in _degree_patterns():
        match = pattern.search(rest)
        while match:
            found.setdefault(name, int(match.group(1)))
            if name == "hybrid" and match.group(2):
                found["replicate"], found["shard"] = int(match.group(1)), int(match.group(2))
            rest = f"{rest[: match.start()]} {rest[match.end() :]}"
            match = pattern.search(rest)
    return found, rest


# -- numbers ----------------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"[~≈≃><]?\s*([+-]?[0-9][0-9.,' _]*(?:e[+-]?[0-9]+)?|[+-]?\.[0-9]+)\s*([a-z%°µ#*/ ]*)", re.I
)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:([,' _])\d{3})(?:\1\d{3})*(\.\d+)?(?:e[+-]?\d+)?", re.I)
_POINTS = re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+,\d+")
_COMMA = re.compile(r"[+-]?\d+,\d+")


def read_number(text: str, *, thousand: float = 1000.0, units: tuple[str, ...] = ()) -> float:
    """The number of a cell such as "1,234.5", "39.5 %", "4k" or "12,5".

    A comma before other than three digits is a decimal one. `thousand`: what "k" stands for; `units`: words
    that may follow. Raises ValueError with the reason.
    """
    match = _NUMBER.fullmatch(_folded(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is no number")
    digits, unit = match.group(1).strip(), match.group(2).strip(" *#").lower()
    if _GROUPED.fullmatch(digits):
        digits = re.sub(r"[,' _]", "", digits)
    elif _POINTS.fullmatch(digits):
        digits = digits.replace(".", "").replace(",", ".")
    elif _COMMA.fullmatch(digits):
        digits = digits.replace(",", ".")
    factor = {"": 1.0, "k": thousand, "m": thousand**2}.get(unit)
    if factor is None and unit in units:
        factor = 1.0
    if factor is None:
        raise ValueError(f"{text!r}: the unit {unit!r} is not known here")
    try:
        return float(digits) * factor
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def read_unit(text: str) -> MetricUnit:
    """What the unit of a published value means. Raises ValueError with the nearest for an unknown one."""
    vocabulary = spellings().metric
    text = vocabulary.other.get(plain(text), text)
    parts = [
        pieces("metric", part)
        for part in re.split(
            r"/|(?<![a-z])per(?![a-z])", re.sub(r"[_^-]|·", " ", text.lower()).replace(" 1", "")
        )
    ]
    known = "/".join(" ".join(found) for found, _ in parts if found)
    if any(unknown for _, unknown in parts) or known not in vocabulary.units:
        legal = list(vocabulary.units)
        raise ValueError(f"metric={text!r} is not known{nearest(text, legal)}; known: {', '.join(legal)}")
    return vocabulary.units[known]


# -- names of models --------------------------------------------------------------------------------------


def model_key(name: str) -> str:
    """A model's name without organisation, case, separators and words that change no shape.

    Numbers stand apart: "Qwen3_30B.A3B" is "qwen-3-30-ba-3-b".
    """
    text = re.sub(r"\([^)]*\)", " ", _folded(name).rsplit("/", 1)[-1])
    key = _joined(re.sub(r"\bv0\.\d\b", " ", text), spellings().model.ignored)
    for begins, instead in spellings().model.begins.items():
        if f"{key}-".startswith(f"{(spelt := _joined(begins))}-"):
            return _joined(instead) + key[len(spelt) :]
    return key


@lru_cache(maxsize=256)
def _joined(name: str, ignored: tuple[str, ...] = ()) -> str:
    runs = (word.strip(".") for word in re.findall(r"[0-9.]+|[a-z]+", name.casefold()))
    words = (word for word in runs if word and word not in ignored)
    return re.sub(r"(?<=[a-z])-(?=[a-z])", "", "-".join(words))
