"""The engines by name; a new engine is one folder or file and one line here (docs/extend.md)."""

from __future__ import annotations

import os

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.engine.compiled.cache import cache_folder, is_ready, numba_version
from moesim.simulator.engine.compiled.engine import AutomaticEngine, CompiledEngine
from moesim.simulator.engine.compiled.warm import start_in_background
from moesim.simulator.engine.protocol import Engine
from moesim.simulator.engine.simpy.execute import SimpyEngine

DEFAULT = "auto"
VARIABLE = "MOESIM_ENGINE"
"""Environment variable that names the engine of all predictions for which no other is asked."""

_reference = SimpyEngine()
_compiled = CompiledEngine(_reference)

ENGINES: dict[str, Engine] = {
    "simpy": _reference,
    "compiled": _compiled,
    DEFAULT: AutomaticEngine(_compiled, _reference),
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


def is_compiling() -> bool:
    """Whether the code of the compiled engine is still to come for predictions that would use it.

    A process in the background then compiles it; this starts one where none does so yet. Raises
    InputError for an unknown engine.
    """
    folder = cache_folder()
    if engine_of() is _reference or numba_version() is None or folder is None or is_ready(folder):
        return False
    start_in_background()
    return True
