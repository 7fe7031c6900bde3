"""Words and colours of what a timeline shows: schedule actions, phases, sends and the end of the step."""

from __future__ import annotations

from collections.abc import Mapping

from moesim.app.charts.style import (
    BLUE,
    GREEN,
    GREY,
    INDIGO,
    INK,
    OLIVE,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TEAL,
    WINE,
    YELLOW,
)

ROSE, SAND, GOLD, PALE, ASH = "#CC6677", "#DDCC77", "#A6761D", "#A0CBE8", "#BAB0AC"
"""Further colours for sends and the end of a step, which stand beside many phases on the critical path."""

ACTIONS: Mapping[str, str] = {
    "F": BLUE,
    "F&B": GREEN,
    "F&I": TEAL,
    "B": RED,
    "I": ORANGE,
    "W": YELLOW,
    "gradient reduction": ROSE,
    "gradient norm": GREY,
    "optimizer": INK,
    "parameter gather": PALE,
}
"""Schedule actions and the end of a step, each with a colour of its own."""

PHASES: Mapping[str, str] = {
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
    "gather": PALE,
    "scatter": ROSE,
    "wait for": RED,
    "notify": RED,
    "prepare": ASH,
    "send activation": SAND,
    "send gradient": GOLD,
    "pipeline send": SAND,
    "other waiting": GREY,
}
"""First words of phases of an action, of pipeline sends and of causes of the critical path."""

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
