"""Limits on the work of one visitor, estimated before a job starts and enforced in its process."""

from __future__ import annotations

import math
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.work_size import WorkLimits, check_size
from moesim.simulator.scenario import Scenario

JOB_BYTES = 1_500_000_000
"""Memory limit of one job's process, the imported simulator included.

A full plan search of the home case needs 0.5 GB."""
VALUE_BYTES = 16_000_000
"""Size limit of a job's pickled result, which the server holds. The trace of the home case has 3 MB."""
READ_S = 20.0
"""Time limit for reading a link or an upload."""
SHORT_S = 60.0
LONG_S = 600.0

LIMITS = WorkLimits(
    most_bytes=1_300_000_000,
    most_seconds=20.0,
    most_parts=1_000_000,
    where="the dashboard",
    instead="run it with the command line (moesim simulate), which takes what your machine can hold",
)
"""Limit on the estimate made before a job; an interval or advice runs up to about ten such simulations."""
DRAWN_PARTS = 3_000_000
"""Most GPUs, switches and cables together of a cluster that is drawn and counted."""

LINK_TEXTS = 200
LINK_CHARACTERS = 16_000
"""Limit on all changes of one scenario together; a link that a browser accepts is shorter."""


def admit(scenario: Scenario, *, trace: bool = False) -> Scenario:
    """Return the scenario itself; raise InputError where simulating it exceeds the dashboard's limits."""
    check_size(scenario, scenario.shape, scenario.machines, LIMITS, trace=trace)
    return scenario


def check_link(texts: Sequence[str]) -> None:
    """Raise InputError where a link has more changes, or longer ones, than the dashboard reads."""
    length = sum(map(len, texts))
    if len(texts) > LINK_TEXTS or length > LINK_CHARACTERS:
        raise InputError(
            f"the link has {len(texts):,} changes of together {length:,} characters, more than the "
            f"{LINK_TEXTS} and {LINK_CHARACTERS:,} that are read; upload the scenario as a file instead"
        )


def enforce(budget_s: float) -> None:
    """Have the system end this process at its limits of memory, processor time and wall-clock time."""
    seconds = math.ceil(budget_s) + 5
    for kind, most in (
        (resource.RLIMIT_DATA, JOB_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # a system that has no such limit, or a lower one
            resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
