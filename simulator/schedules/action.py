"""Actions of a pipeline schedule, and their text form in the notation of PyTorch's pipelining."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moesim.hwmodels.errors import InputError

Kind = Literal["F", "I", "W", "B"]
"""Kind of an action: forward (F), input gradient (I), weight gradient (W), or both gradients in one (B)."""

KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")

OVERLAP_SUFFIX = "OVERLAP_F_B"

# Six digits bound every index: a hostile file cannot ask for a stage number that fills the memory.
_ACTION = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")
_OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_COMMUNICATION = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_", "RECV_")
_FORMAT = (
    "write <stage><F|I|W|B><micro-batch>, such as 3F12 (F forward, I input gradient, W weight gradient, "
    "B both gradients), or an overlapped pair such as (0F7;7B3)OVERLAP_F_B"
)


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or a gradient (`kind`) of one stage for one micro-batch, such as `3F12`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """Text form, such as `3F12`."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward action that run as one overlapped pair, such as `(0F7;7B3)OVERLAP_F_B`."""

    first: Action
    second: Action

    def __str__(self) -> str:
        """Text form, such as `(0F7;7B3)OVERLAP_F_B`."""
        return f"({self.first};{self.second}){OVERLAP_SUFFIX}"


Step: TypeAlias = Action | Overlap
"""One step of a rank, either a single action or an overlapped pair."""


def actions_of(step: Step) -> tuple[Action, ...]:
    """Actions of a step, in the order in which they are written."""
    return (step.first, step.second) if isinstance(step, Overlap) else (step,)


def parse_step(text: str, where: str = "schedule") -> Step:
    """Read one step, as the reverse of `str(step)`; blanks around it are ignored.

    Raises InputError, beginning with `where`, for text that is not a step.
    """
    cell = text.strip()
    pair = _OVERLAP.fullmatch(cell)
    if pair is None:
        return _parse_action(cell, cell, where)
    first = _parse_action(pair[1].strip(), cell, where)
    second = _parse_action(pair[2].strip(), cell, where)
    if first.kind != "F" or second.kind not in ("B", "I"):
        raise InputError(
            f"{where}: {_shown(cell)} is not an overlapped pair: the first part must be a forward (F) and "
            f"the second a backward (B or I); {_FORMAT}."
        )
    return Overlap(first, second)


def _parse_action(text: str, cell: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        reason = ""
        if any(word in text for word in _COMMUNICATION):
            reason = (
                " (communication and sharding belong to PyTorch's compute_comms format, this is compute_only)"
            )
        raise InputError(f"{where}: cannot read {_shown(cell)} as a schedule step{reason}; {_FORMAT}.")
    kind: Kind = match[2]  # type: ignore[assignment]  # the pattern admits no other letter
    return Action(int(match[1]), kind, int(match[3]))


def _shown(text: str) -> str:
    """Quote input text so that control characters and very long cells stay one readable line."""
    return ascii(text if len(text) <= 60 else text[:57] + "...")
