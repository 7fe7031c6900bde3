"""Reads and writes Megatron-LM's pipeline layouts and layer-frequency lists, without eval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from moesim.hwmodels.errors import InputError

MOST_ITEMS = 10_000
"""Most letters or list items into which a text may expand."""

_LETTERS = "EtmL|"


def expand_layout(text: str) -> str:
    """Expand the repeats of a --pipeline-model-parallel-layout: "Et*2|(tt|)*2L" becomes "Ett|tt|tt|L".

    E is the embedding, t a decoder layer, m an MTP module, L the loss, and | starts the next stage; x*N and
    (...)*N repeat, commas and blanks are ignored (Megatron-Core documentation). Raises InputError for
    anything else.
    """
    letters, position = _sequence(text, 0, 0)
    if position != len(text):
        raise _wrong(text, position, "a ) without its (")
    return letters


def _sequence(text: str, position: int, depth: int) -> tuple[str, int]:
    if depth > 32:
        raise InputError("pipeline layout: parentheses more than 32 deep; write the repeats out")
    parts: list[str] = []
    size = 0
    while position < len(text) and text[position] != ")":
        char = text[position]
        if char in ", ":
            position += 1
            continue
        if char == "(":
            item, position = _sequence(text, position + 1, depth + 1)
            if position >= len(text):
                raise _wrong(text, position, "a ( that is not closed")
            position += 1
        elif char in _LETTERS:
            item, position = char, position + 1
        else:
            raise _wrong(text, position, f"{char!r}")
        times = re.compile(r"\*(\d{1,6})").match(text, position)
        if times:
            position = times.end()
            if len(item) * int(times[1]) > MOST_ITEMS:
                raise _wrong(text, position, "a repeat that is too long")
            item *= int(times[1])
        elif position < len(text) and text[position] == "*":
            raise _wrong(text, position, "a * without a number")
        parts.append(item)
        size += len(item)
        if size > MOST_ITEMS:
            raise _wrong(text, position, "more than 10,000 letters")
    return "".join(parts), position


def _wrong(text: str, position: int, what: str) -> InputError:
    return InputError(
        f"pipeline layout {text[:80]!r}: {what} at position {position}; write E, t, m, L and | with repeats "
        "such as t*3 or (tt|)*29"
    )


def layers_of_layout(text: str) -> tuple[int, tuple[int, ...] | None]:
    """Number of stages, and decoder layers of each stage; the latter is None for an unsupported layout.

    moesim keeps the embedding on the first stage, the loss on the last, and all MTP modules on one stage
    behind the layers (`mtp_stage_of_layout`). Raises InputError for a text that cannot be read.
    """
    stages = expand_layout(text).split("|")
    order = "".join(stages)
    in_order = re.fullmatch("Et*m*L", order) and stages[0].startswith("E") and stages[-1].endswith("L")
    if not in_order or sum("m" in stage for stage in stages) > 1:
        return len(stages), None
    return len(stages), tuple(stage.count("t") for stage in stages)


def mtp_stage_of_layout(text: str) -> int | None:
    """Stage of the MTP modules as `stages.mtp` counts it, from the end; None for the last stage or none.

    Raises InputError for a text that cannot be read.
    """
    stages = expand_layout(text).split("|")
    found = [number - len(stages) for number, stage in enumerate(stages) if "m" in stage]
    return found[0] if found and found[0] != -1 else None


def layout_text(layers: Sequence[int], mtp_layers: int, mtp_stage: int | None = None) -> str:
    """Write decoder layers by stage as a layout with repeats, such as "Et*4|(tt|)*2tmL".

    `mtp_stage`: the stage of the MTP modules, negative from the end; None for the last.
    """
    stages = ["t" * n for n in layers]
    stages[0] = "E" + stages[0]
    stages[-1 if mtp_stage is None else mtp_stage] += "m" * mtp_layers
    stages[-1] += "L"
    runs = [(stage, len(list(run))) for stage, run in groupby(stages[:-1])]
    parts = [f"({_short(s)}|)*{n}" if n > 1 else f"{_short(s)}|" for s, n in runs]
    return "".join(parts) + _short(stages[-1])


def _short(stage: str) -> str:
    runs = [(letter, len(list(run))) for letter, run in groupby(stage)]
    return "".join(f"{letter}*{n}" if n > 2 else letter * n for letter, n in runs)


def parse_frequency(text: str, layers: int) -> tuple[int, ...]:
    """Read --moe-layer-freq into one entry a layer: 1 for a MoE layer, 0 for a dense layer.

    "N" makes every Nth layer from the first a MoE layer; "([0]*3+[1]*58)" joins lists with repeats, and
    "([0]+[1])*30" repeats the whole. Raises InputError for anything else.
    """
    stripped = text.replace(" ", "")
    if re.fullmatch(r"\d{1,6}", stripped) and int(stripped) > 0:
        return tuple(int(layer % int(stripped) == 0) for layer in range(layers))
    repeated = re.fullmatch(r"\(([^()]*)\)\*(\d{1,6})", stripped)
    whole = int(repeated[2]) if repeated else 1
    stripped = f"({repeated[1]})" if repeated else stripped
    body = stripped[1:-1] if stripped.startswith("(") and stripped.endswith(")") else stripped
    found: list[int] = []
    for term in body.split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*)\](?:\*(\d{1,6}))?\)?", term)
        if match is None:
            raise InputError(
                f"--moe-layer-freq {text[:80]!r}: cannot read {term[:40]!r}; write a number or lists such as "
                "([0]*3+[1]*58)"
            )
        entries, times = [int(n) for n in match[1].split(",")], int(match[2] or 1)
        if (len(found) + len(entries) * times) * max(whole, 1) > MOST_ITEMS:
            raise InputError(f"--moe-layer-freq {text[:80]!r}: more than {MOST_ITEMS:,} entries")
        found += entries * times
    return tuple(found * whole)


def frequency_text(flags: list[int]) -> str:
    """The flags as a --moe-layer-freq list with repeats, such as "([0]*3+[1]*58)"."""
    runs = [(flag, len(list(run))) for flag, run in groupby(flags)]
    return "(" + "+".join(f"[{flag}]*{count}" for flag, count in runs) + ")"
