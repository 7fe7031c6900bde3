"""What the work of one visitor may cost: estimated before it starts, enforced in its process."""

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
"""Of one job's process, the imported simulator included. A full search of the home case needs 0.5 GB."""
VALUE_BYTES = 16_000_000
"""Of a job's result, pickled: the server holds it. The trace of the home case has 3 MB."""
READ_S = 20.0
"""To read what a link or an upload says."""
SHORT_S = 60.0
LONG_S = 600.0

LIMITS = WorkLimits(
    most_bytes=1_300_000_000,
    most_seconds=20.0,
    most_parts=1_000_000,
    where="the dashboard",
    instead="run it with the command line (moesim simulate), which takes what your machine can hold",
)
"""Estimated before a job; an interval or advice runs up to some ten simulations of that size."""
DRAWN_PARTS = 3_000_000
"""GPUs, switches and cables of a cluster that is drawn and counted."""

LINK_TEXTS = 200
LINK_CHARACTERS = 16_000
"""Of all changes of one scenario together; a link that a browser keeps is shorter."""


def admit(scenario: Scenario, *, trace: bool = False) -> Scenario:
    """The scenario itself; raises InputError where simulating it is more than the dashboard takes on."""
    check_size(scenario, scenario.shape, scenario.machines, LIMITS, trace=trace)
    return scenario


def check_link(texts: Sequence[str]) -> None:
    """Raise InputError where a link has more changes, or longer ones, than any of ours."""
    length = sum(map(len, texts))
    if len(texts) > LINK_TEXTS or length > LINK_CHARACTERS:
        raise InputError(
            f"the link has {len(texts):,} changes of together {length:,} characters, more than the "
            f"{LINK_TEXTS} and {LINK_CHARACTERS:,} that are read; upload the scenario as a file instead"
        )


def enforce(budget_s: float) -> None:
    """Let the system end this process at its limits: memory, time of the processor and of the clock."""
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
