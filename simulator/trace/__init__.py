"""A profiler's trace of a step, read: what ran on the GPU, in classes of our model, and why it was idle.

    >>> import moesim
    >>> trace = moesim.trace("rank0_trace.json.gz")
    >>> rank = trace.ranks[0]
    >>> rank.events["end"] - rank.events["start"], rank.steps, trace.table()

`read` gives a `StepTrace`. Its `ranks` are `RankTrace`s: `events` is a structured array (dtype `EVENT`,
one row an activity of a GPU in order of start; times in integer nanoseconds of the rank's own clock; `cls`
a place in `CLASSES`, `phase` in `PHASES`; `layer`, `microbatch`, `step` numbers or -1; `name`, `op`,
`scope` and `shape` places in `names` or -1; `launch` the start of the host call). `steps` has a row a step
with wall, busy, compute, communication, exposed and idle nanoseconds and `idle_by_cause_ns`; `collectives`
a row a collective. `StepTrace.matched` has transfer and waiting, `offsets_ns` the clocks, `notes` what a
reader must know. Nothing of a file is executed. Errors are InputErrors.
"""

from moesim.simulator.trace.classes import CLASSES, Rules, read_rules
from moesim.simulator.trace.events import EVENT, PHASES
from moesim.simulator.trace.read import RankTrace, StepTrace, read

__all__ = ["CLASSES", "EVENT", "PHASES", "RankTrace", "Rules", "StepTrace", "read", "read_rules"]
