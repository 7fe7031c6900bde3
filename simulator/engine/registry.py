"""The engines by name; a new engine is one folder or file and one line here (docs/extend.md)."""

from __future__ import annotations

import os
from collections.abc import Callable

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.compiled.engine import (
    TASKS_BEFORE,
    AutomaticEngine,
    CompiledEngine,
    end_at,
    repeated,
    start_in_background,
)
from moesim.simulator.engine.compiled.loader import Call, attempts, is_ready, native, place, problem
from moesim.simulator.engine.compiled.lower import StepRates
from moesim.simulator.engine.link_map import LinkMap
from moesim.simulator.engine.program import MemberVariation, Program
from moesim.simulator.engine.records import Engine
from moesim.simulator.engine.simpy.execute import SimpyEngine

DEFAULT = "auto"
VARIABLE = "MOESIM_ENGINE"
"""Environment variable that names the engine of all predictions for which no other is asked."""

_reference = SimpyEngine()
_compiled = CompiledEngine(_reference)
_automatic = AutomaticEngine(_compiled, _reference)

ENGINES: dict[str, Engine] = {
    "simpy": _reference,
    "compiled": _compiled,
    DEFAULT: _automatic,
}


def engine_of(name: str | None = None) -> Engine:
    """The engine called `name`, or the one that MOESIM_ENGINE names, or the default engine.

    Raises InputError for an unknown name.
    """
    chosen = name or os.environ.get(VARIABLE) or DEFAULT
    if chosen not in ENGINES:
        raise InputError(
            f"engine={chosen!r} is not known{nearest(chosen, list(ENGINES))}; known: {', '.join(ENGINES)}",
            key="engine",
        )
    return ENGINES[chosen]


def repeated_step(
    engine: Engine, program: Program
) -> Callable[[CostTable, MemberVariation, LinkMap], int | None] | None:
    """What gives the end (ns) of a program of folded resolution at other prices, clocks, loads and links.

    It gives None where these need another program. None where SimPy is to run the program.
    """
    compiled = engine is _compiled or (engine is _automatic and _automatic.takes_compiled([program]))
    if not (compiled and _compiled.loads()):
        return None
    step = repeated(program)
    return lambda *rates: end_at(step, StepRates(*rates))


REQUESTS_BEFORE = 3_000
"""Requests that SimPy serves in the time in which compiled code is loaded."""


def request_loop(requests: int) -> Call | None:
    """The compiled loop that serves so many requests, None where SimPy is to serve them.

    As for steps: `auto` takes it for many requests once it is in the cache, `compiled` makes it.
    """
    engine = engine_of()
    if engine is _reference or (
        engine is _automatic and not (requests > REQUESTS_BEFORE and _automatic.is_ready())
    ):
        return None
    return native().serve if _compiled.loads() else None


def is_compiling() -> bool:
    """Whether the code of the compiled engine is still to come for predictions that would use it.

    A process in the background then compiles it; this starts one where none does so yet. Raises
    InputError for an unknown engine.
    """
    if engine_of() is _reference or is_ready() or problem() is not None:
        return False
    start_in_background()
    return True


def engine_report() -> dict[str, str]:
    """Which engine runs steps here, why, and where its code is in which state; for `moesim doctor`.

    Starts and compiles nothing.
    """
    file, why = place()[0], problem()
    state = f"{file}: " if file is not None else ""
    held, lines, _ = attempts(file) if file is not None and why is None else (False, [], 0.0)
    if why is not None:
        state += why if file is None else f"not usable: {why}"
    elif is_ready():
        state += "ready"
    elif held:
        state += f"process {''.join(lines[-1:]) or '?'} compiles now"
    else:
        state += "empty; the first prediction that could use compiled code compiles it in the background"
    name = os.environ.get(VARIABLE) or DEFAULT
    try:
        engine = engine_of(name)
    except InputError as error:
        return {"engine": f"none: {VARIABLE}: {error}", "compiled code": state}
    asked = f"{VARIABLE}={name}" if name != DEFAULT else ""
    if engine is _reference:
        text = f"simpy, because of {asked}"
    elif why is not None:
        text = f"simpy, because the compiled one cannot run: {why}"
    elif engine is _compiled:
        text = f"compiled, because of {asked}"
    elif is_ready():
        text = f"compiled, after the first {TASKS_BEFORE:,} tasks of a process, which simpy runs"
    else:
        text = "simpy, until the code of the compiled one is ready"
    return {"engine": text, "compiled code": state}
