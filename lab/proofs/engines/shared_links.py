"""Random flows on links, run by the compiled functions, and whether their rates are always max-min fair.

The functions of `engine/compiled/{queue,links,rates}.py` run either as plain Python or compiled, over the
same arrays. After every start and end of a flow the rates of all flows are compared with the definition of
max-min fairness, so the search for the flows to be solved again is proved together with the solvers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.compiled import links, memory
from moesim.simulator.engine.compiled.state import (
    ERROR,
    EVENTS,
    FREE_SLOTS,
    NOW,
    SIZES,
    STEP_LAYOUT,
    Room,
    RunState,
    StepSizes,
    Tables,
    new_state,
)
from moesim.simulator.engine.maxmin import CAPACITY_UNITS

MODULES = (memory, links)
SLACK = 1e-9
"""Relative rounding error that a sum of rates may have."""
MOST_EVENTS = 10_000
"""Starts, ends and deadlines of a case, far more than a right solver has."""


class Case(NamedTuple):
    """Flows on links: capacity [links] in bytes/ns; per flow its start (ns), its duration where nothing else
    moves (ns), its links and its bytes on them."""

    capacity: FloatArray
    starts: IntArray
    alone_ns: FloatArray
    links: Sequence[IntArray]
    bytes: Sequence[FloatArray]


def random_case(seed: int, most_flows: int = 9) -> Case:
    """A few links with flows that come and go; equal bandwidths and bytes, which make ties, are frequent."""
    random = np.random.default_rng([seed, 7])
    capacity = random.choice([0.3, 1.0, 1.0, 2.0, 7.5, 64.0], random.integers(1, 6))
    if random.random() < 0.1:
        capacity[0] = np.inf
    crossed, amounts, alone = [], [], []
    for _ in range(int(random.integers(2, most_flows + 1))):
        width = int(random.integers(1, min(3, len(capacity)) + 1))
        own = random.choice(len(capacity), width, replace=False)
        size = random.choice([10.0, 10.0, 64.0, 1000.0, float(random.uniform(1.0, 1e6))], width)
        if random.random() < 0.5:
            size[:] = size[0]
        fastest = float((size / capacity[own]).max())
        crossed.append(own)
        amounts.append(size)
        alone.append(max(1.0, fastest * float(random.choice([0.5, 1.0, 1.0, 1.5, 4.0]))))
    longest = max(alone)
    starts = random.choice([0.0, 0.0, *(random.random(3) * longest)], len(alone)).astype(np.int64)
    order = np.argsort(starts, kind="stable")
    return Case(
        capacity,
        starts[order],
        np.array(alone)[order],
        [crossed[n] for n in order],
        [amounts[n] for n in order],
    )


def arrays_of(case: Case, few: bool) -> tuple[Tables, RunState]:
    """The arrays of a run with nothing but these links; `few`: the solver for few links."""
    flows = len(case.starts)
    bounds = np.cumsum([0, *(len(own) for own in case.links)])
    sizes = StepSizes(1, 1, 1, 1, 1, True, few, 0, 0, 0)
    with np.errstate(divide="ignore"):
        unit = CAPACITY_UNITS / case.capacity
    given: Mapping[str, Any] = {
        "process_first": np.zeros(2, dtype=np.int64),
        "demand_first": bounds,
        "code_first": np.zeros(1, dtype=np.int64),
        "demand_links": np.concatenate(case.links).astype(np.int32),
        "demand_bytes": np.concatenate(case.bytes),
        "pattern_first_link": np.array([0, int(np.diff(bounds).max())]),
        "capacity": case.capacity,
        "unit": unit,
    }
    empty = {name: np.zeros(0, dtype=STEP_LAYOUT.dtype_of(name)) for name in Tables._fields}
    tables = Tables(**{**empty, **given})
    return tables, new_state(tables, sizes, Room(8 * flows * flows + 64, flows, flows, flows))


def plain_run(tables: Tables, state: RunState) -> Any:
    """The arrays as compiled code sees them, for the same functions in plain Python."""
    flat = {name: array.reshape(-1) for name, array in state._asdict().items() if name != "sizes"}
    numbers = dict(zip(SIZES, state.sizes.tolist(), strict=True))
    return SimpleNamespace(**tables._asdict(), **flat, **numbers)


@contextmanager
def in_plain_python() -> Iterator[None]:
    """Within this context the compiled functions of links and rates are the Python functions that they are
    made of; `row_of`, which only compiled code has, becomes a view."""
    kept: list[tuple[ModuleType, str, Any]] = []
    for module in MODULES:
        for name, member in inspect.getmembers(module, lambda m: hasattr(m, "py_func")):
            kept.append((module, name, member))
            setattr(module, name, member.py_func)
        if hasattr(module, "row_of"):
            kept.append((module, "row_of", module.row_of))
            setattr(module, "row_of", lambda vector, row, width: vector[row * width : (row + 1) * width])  # noqa: B010
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            yield
    finally:
        for module, name, member in kept:
            setattr(module, name, member)


class PlainLinks:
    """Calls the functions of links in plain Python; use it within `in_plain_python`."""

    def __init__(self, tables: Tables, state: RunState) -> None:
        """Over the arrays of a run."""
        self.run = plain_run(tables, state)

    def begin(self, *arguments: Any) -> None:
        """Start a flow."""
        links.begin_flow(self.run, *arguments)

    def next_end(self) -> int:
        """Take the next event; return the flow that has ended at it, or -1."""
        run = self.run
        place = memory.take_first(run)
        kind, flow = run.queue_what[place] % memory.KINDS, run.queue_what[place] // memory.KINDS
        if kind == memory.DEADLINE and run.queue_extra[place] == run.flow_version[flow]:
            links.end_flow(run, flow)
            return int(flow)
        return -1


class Outcome(NamedTuple):
    """What a run of a case showed: times at which rates were compared, the flows compared then, those of them
    that a link held below their cap, the rates as bytes, and what was wrong, in words."""

    looks: int
    flows: int
    slowed: int
    rates: bytes
    wrong: list[str]


def run_case(case: Case, few: bool, kind: type[Any]) -> Outcome:
    """Run all flows of a case to their ends, and compare the rates after every start and end."""
    tables, state = arrays_of(case, few)
    pool, counters = kind(tables, state), state.counters
    moving: list[int] = []
    begun, seen, flows, slowed, looks, wrong = 0, [], 0, 0, 0, []
    events = 0
    while begun < len(case.starts) or moving:
        if (events := events + 1) > MOST_EVENTS:
            wrong.append("flows do not end")
            break
        upcoming = state.queue_time[0] if counters[EVENTS] else None
        if begun < len(case.starts) and (upcoming is None or case.starts[begun] <= upcoming):
            counters[NOW] = max(counters[NOW], case.starts[begun])
            first, width = int(tables.demand_first[begun]), len(case.links[begun])
            slot = -1
            if begun % 2:  # as an exchange of routed rows, which has links and bytes of its own
                counters[FREE_SLOTS] -= 1
                slot = int(state.slots[counters[FREE_SLOTS]])
                own = int(state.sizes[SIZES.index("constant_entries")]) + slot * int(
                    state.sizes[SIZES.index("widest")]
                )
                state.pool_links[own : own + width] = case.links[begun]
                state.pool_bytes[own : own + width] = case.bytes[begun]
                first = own
            pool.begin(-1, float(case.alone_ns[begun]), first, width, slot)
            moving.append(begun)
            begun += 1
        elif (ended := pool.next_end()) >= 0:
            moving.remove(ended)
        else:
            continue
        if counters[ERROR]:
            wrong.append(f"error {counters[ERROR]}")
            break
        now = state.flow_rate[moving]
        seen.append(now.tobytes())
        held, unfair = judge(case, moving, now)
        looks, flows, slowed = looks + 1, flows + len(moving), slowed + held
        wrong += [f"at {counters[NOW]} ns: {reason}" for reason in unfair]
    return Outcome(looks, flows, slowed, b"".join(seen), wrong)


def judge(case: Case, moving: Sequence[int], now: FloatArray) -> tuple[int, list[str]]:
    """How many flows are below their cap, and what contradicts max-min fairness.

    `now`: rates of the flows `moving`, in whole transfers per ns. The definition: no link carries more than
    its capacity, no flow exceeds its cap, and a flow below its cap crosses a full link on which no flow has
    more bandwidth, where the bandwidth of a flow is that on the link with most of its bytes. Source:
    Bertsekas and Gallager, Data Networks, section 6.5.2.
    """
    carried, widest = np.zeros(len(case.capacity)), np.zeros(len(case.capacity))
    width = [rate * case.bytes[flow].max() for flow, rate in zip(moving, now, strict=True)]
    for flow, rate, bandwidth in zip(moving, now, width, strict=True):
        for link, amount in zip(case.links[flow].tolist(), case.bytes[flow].tolist(), strict=True):
            carried[link] += rate * amount
            widest[link] = max(widest[link], bandwidth)
    wrong = [
        f"link {link} carries {carried[link]} of {case.capacity[link]} bytes/ns"
        for link in np.flatnonzero(carried > case.capacity * (1 + SLACK)).tolist()
    ]
    full, held = carried >= case.capacity * (1 - SLACK), 0
    for flow, rate, bandwidth in zip(moving, now, width, strict=True):
        cap = 1.0 / case.alone_ns[flow]
        if not 0.0 < rate <= cap * (1 + SLACK):
            wrong.append(f"flow {flow} runs at {rate}, with a cap of {cap} per ns")
        elif rate < cap * (1 - SLACK):
            held += 1
            own = case.links[flow]
            if not (full[own] & (bandwidth >= widest[own] * (1 - SLACK))).any():
                wrong.append(f"flow {flow} has neither its cap nor a bottleneck")
    return held, wrong
