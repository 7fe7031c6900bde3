"""Reports the launch stalls of a step."""

from __future__ import annotations

from itertools import chain
from math import fsum

from pydantic import BaseModel, ConfigDict

from moesim.simulator.engine.program import Program
from moesim.simulator.frameworks.software import Software

BOUND_SHARE = 0.10
"""Share of launch stalls in a step from which a run is called bound by the host."""


class HostReport(BaseModel):
    """Launch stalls of a step, averaged over pipeline ranks; `bound`: they are at least a tenth of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    wait_s: float
    share: float
    bound: bool


def host_report(software: Software, program: Program, step_s: float) -> HostReport | None:
    """Report of the launch stalls of a step; None where the scenario names no host."""
    if software.host is None:
        return None
    codes = {id(step.code): step.code for steps in program.ranks for step in steps}
    stalls = {key: [task.price.host_s for task in code.tasks] for key, code in codes.items()}
    waits = [fsum(chain.from_iterable(stalls[id(step.code)] for step in steps)) for steps in program.ranks]
    wait_s = fsum(waits) / len(waits)
    share = wait_s / step_s
    return HostReport(host=software.host, wait_s=wait_s, share=share, bound=share >= BOUND_SHARE)
