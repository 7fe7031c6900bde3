"""The engines by name; a new engine is one folder or file and one line here (docs/extend.md)."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.engine.protocol import Engine
from moesim.simulator.engine.simpy.execute import SimpyEngine

DEFAULT = "simpy"

ENGINES: dict[str, Engine] = {
    DEFAULT: SimpyEngine(),
}


def engine_of(name: str | None = None) -> Engine:
    """The engine called `name`, or the default engine; raises InputError for an unknown name."""
    chosen = name or DEFAULT
    if chosen not in ENGINES:
        raise InputError(
            f"engine={chosen!r} is not known{nearest(chosen, list(ENGINES))}; known: {', '.join(ENGINES)}",
            key="engine",
        )
    return ENGINES[chosen]
