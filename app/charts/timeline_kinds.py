"""Words and colours of what a timeline shows: schedule actions, phases, sends and the end of the step."""

from __future__ import annotations

from moesim.app.charts.style import (
    ACTIONS,
    BLUE,
    GREEN,
    GREY,
    INDIGO,
    OLIVE,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TEAL,
    WINE,
    YELLOW,
)

PHASES = {
    "attn F": BLUE,
    "mlp F": SKY,
    "attn I": ORANGE,
    "mlp I": YELLOW,
    "attn W": PURPLE,
    "mlp W": WINE,
    "dispatch F": GREEN,
    "dispatch B": OLIVE,
    "combine F": INDIGO,
    "combine B": TEAL,
    "gather": SKY,
    "scatter": PURPLE,
    "wait for": RED,
    "notify": RED,
    "prepare": GREY,
    "send activation": BLUE,
    "send gradient": RED,
    "pipeline send": SKY,
    "other waiting": GREY,
}
"""Phases of an action, pipeline sends and causes of the critical path; a row has few of them at a time."""

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "F&B": "F&B pair",
    "F&I": "F&I pair",
    "notify": "wait for other GPUs",
}
"""Schedule actions in the words of the field."""


def colour(kind: str) -> str:
    """The colour of an action or a phase."""
    if kind in ACTIONS:
        return ACTIONS[kind]
    return next((value for name, value in PHASES.items() if kind.startswith(name)), GREY)


def words(kind: str) -> str:
    """An action or a phase in the words of the field."""
    return WORDS.get(kind, kind)
