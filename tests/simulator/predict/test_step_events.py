"""The events of a step as columns: they are the trace's own slices, and their sums are the breakdown's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.critical import critical_path
from moesim.simulator.engine.records import last_group
from moesim.simulator.predict.report import breakdowns
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.predict.step_events import (
    EXPOSED,
    HIDDEN,
    NO_TRANSFER,
    OWN_SENDS,
    EventList,
    Events,
    StepEvents,
    communication_spans,
    execution_events,
    step_events,
)
from moesim.simulator.predict.trace import (
    COMPUTE,
    FIRST_SEND,
    SCHEDULE,
    chrome_trace,
    shown_gpus,
    shown_places,
    trace_info,
)

SMALL = (
    "deepseek-v3-2048xh800",
    "cluster.nodes=8",
    "stages.blocks=[embedding dense moe, moe*2, moe*2, moe head]",
)
PIPELINE = (*SMALL, "parallel={pp: 4, ep: 8}", "batch.sequences=256")
CASES = {
    "DualPipe": PIPELINE,
    "full resolution": (
        *PIPELINE,
        "resolution=full",
    ),
    "tensor parallel, no pairs": (
        *PIPELINE,
        "schedule=1f1b",
        "parallel.tp=2",
        "parallel.sequence_parallel=true",
    ),
    "sharded parameters": (*PIPELINE, "schedule=1f1b", "parallel.zero_stage=3"),
    "part of a model": ("deepseek-v3-trace-pair",),
}


@lru_cache(maxsize=len(CASES))
def executed(case: str) -> ExecutedStep:
    return run_step(moesim.load(*CASES[case]))


@lru_cache(maxsize=len(CASES))
def events_of(case: str) -> StepEvents:
    executions = executed(case).executions
    return execution_events(executions[0], critical_path(last_group(executions)))


def slices(events: Events, gpus: list[int]) -> list[tuple[Any, ...]]:
    """(GPU, thread, begin, end) of every event that a trace has too."""
    shown = events.where(
        ((events.stream < HIDDEN) | (events.stream >= FIRST_SEND))
        & ~((events.stream == SCHEDULE) & (events.action < 0))
    )
    rows = zip(
        shown.rank.tolist(),
        shown.stream.tolist(),
        shown.begin_ns.tolist(),
        shown.end_ns.tolist(),
        strict=True,
    )
    return sorted((gpus[rank], stream, begin, end) for rank, stream, begin, end in rows)


@pytest.mark.parametrize("case", CASES)
def test_the_events_are_the_slices_of_the_trace(case: str) -> None:
    step = executed(case)
    info = trace_info(step.prepared, 0)
    if step.prepared.whole is not None:
        shown = shown_gpus(step.prepared, step.executions)
    else:
        shown = shown_places(step.executions[0], info)
    trace = chrome_trace(shown)["traceEvents"]
    wanted = sorted(
        (e["pid"], e["tid"], round(e["ts"] * 1e3), round(e["ts"] * 1e3) + round(e["dur"] * 1e3))
        for e in trace
        if e["ph"] == "X"
    )
    found = slices(events_of(case).events, [row[0] for row in info.gpus])
    assert len(found) == len(wanted) > 100
    assert found == wanted


@pytest.mark.parametrize("case", CASES)
def test_rows_are_in_order_and_overlap_nowhere(case: str) -> None:
    events = events_of(case).events
    assert (events.end_ns > events.begin_ns).all()
    same = (np.diff(events.rank) == 0) & (np.diff(events.stream) == 0)
    assert (events.begin_ns[1:][same] >= events.end_ns[:-1][same]).all()


@pytest.mark.parametrize("case", CASES)
def test_exposed_communication_of_all_members_is_the_breakdowns(case: str) -> None:
    execution = executed(case).executions[0]
    path = critical_path(execution)
    members, ranks = execution.program.members, len(execution.syncs)
    total = np.zeros(ranks)
    for member in range(members):
        events = execution_events(execution, path, member).events
        exposed = events.where(events.stream == EXPOSED)
        total += np.bincount(exposed.rank, exposed.end_ns - exposed.begin_ns, ranks)
    wanted = [row.exposed_communication for row in breakdowns(execution)]
    assert total / members / 1e9 == pytest.approx(wanted, abs=1e-6)
    assert max(wanted) > 0


def covered(events: Events, stream: int, rank: int) -> set[tuple[int, int]]:
    own = events.where((events.stream == stream) & (events.rank == rank))
    return set(zip(own.begin_ns.tolist(), own.end_ns.tolist(), strict=True))


def test_hidden_lies_beside_computing_and_exposed_does_not() -> None:
    step = events_of("DualPipe")
    for rank in (0, 3):
        computes = np.array(sorted(covered(step.events, COMPUTE, rank)))
        for stream, beside in ((HIDDEN, True), (EXPOSED, False)):
            for begin, end in covered(step.events, stream, rank):
                at = np.flatnonzero((computes[:, 0] < end) & (computes[:, 1] > begin))
                together = int((np.minimum(computes[at, 1], end) - np.maximum(computes[at, 0], begin)).sum())
                assert together == (end - begin if beside else 0)
    assert (step.actions.hidden_ns[step.actions.rank == 3] > 0).any()


def test_sums_by_action_are_those_of_its_spans() -> None:
    step = events_of("DualPipe")
    for stream, sums in ((HIDDEN, step.actions.hidden_ns), (EXPOSED, step.actions.exposed_ns)):
        own = step.events.where((step.events.stream == stream) & (step.events.action >= 0))
        assert (np.bincount(own.action, own.end_ns - own.begin_ns, len(sums)) == sums).all()


@pytest.mark.parametrize("case", CASES)
def test_the_critical_path_is_whole_and_what_it_goes_through_is_marked(case: str) -> None:
    step, executions = events_of(case), executed(case).executions
    path = step.path
    assert (path.begin_ns[1:] == path.end_ns[:-1]).all()
    assert path.end_ns[-1] == step.end_ns == executions[0].end_ns
    through = set(path.action[path.action >= 0].tolist())
    assert set(np.flatnonzero(step.actions.critical).tolist()) == through
    marked = step.events.where(step.events.critical & (step.events.action >= 0))
    assert set(marked.action.tolist()) == through
    # Every piece of the path inside an action ran on the rank that runs the action.
    inside = path.action >= 0
    assert (step.actions.rank[path.action[inside]] == path.rank[inside]).all()


def test_marked_phases_take_as_long_as_the_path_says_where_it_stays_on_the_shown_gpu() -> None:
    step = events_of("DualPipe")
    path, events = step.path, step.events
    own = (path.member == 0) & (path.action >= 0)
    compute = events.where((events.stream == COMPUTE) & events.critical)
    shown = set(zip(compute.action.tolist(), compute.begin_ns.tolist(), strict=True))
    pieces = [
        (action, begin)
        for action, begin, cause, mine in zip(
            path.action.tolist(), path.begin_ns.tolist(), path.cause, own.tolist(), strict=True
        )
        if mine and cause.startswith(("attn", "mlp"))
    ]
    assert pieces and set(pieces) <= shown


def spans(name: int, *bounds: int) -> Events:
    """Events between pairs of bounds, with a name."""
    begin, end = np.array(bounds[::2], dtype=np.int64), np.array(bounds[1::2], dtype=np.int64)
    zero, none = np.zeros_like(begin), np.full_like(begin, -1)
    return Events(
        ("transfer", "send"),
        zero,
        zero,
        zero + name,
        begin,
        end,
        zero,
        zero,
        none,
        np.zeros(len(begin), bool),
    )


def test_spans_of_communication_by_hand() -> None:
    """An action from 0 to 100 computes 0-40 and 60-90, transfers 30-70, sends 95-110, and is free at 115."""
    hidden, exposed = communication_spans(
        spans(0, 0, 40, 60, 90),
        [spans(0, 30, 70), spans(1, 95, 110)],
        start_ns=np.array([0]),
        end_ns=np.array([100]),
        free_ns=np.array([115]),
    )
    assert list(zip(hidden.begin_ns, hidden.end_ns, hidden.name, strict=True)) == [(30, 40, 0), (60, 70, 0)]
    assert list(zip(exposed.begin_ns, exposed.end_ns, exposed.name, strict=True)) == [
        (40, 60, 0),
        (90, 95, NO_TRANSFER),
        (95, 110, 1),
        (110, 115, OWN_SENDS),
    ]
    assert exposed.action.tolist() == [0, 0, 0, 0]


def test_nothing_gives_nothing() -> None:
    empty = spans(0)
    none = np.zeros(0, dtype=np.int64)
    hidden, exposed = communication_spans(empty, [empty], none, none, none)
    assert len(hidden.begin_ns) == len(exposed.begin_ns) == 0
    assert len(EventList().sorted()) == 0


def test_the_timeline_opens_exactly_the_action_that_is_asked_for() -> None:
    scenario = moesim.load(*PIPELINE)
    step = step_events(scenario)
    own = np.flatnonzero(step.actions.rank == 2)
    for number in (0, 5, len(own) - 1):
        found = moesim.timeline(scenario, rank=2, action=number)
        begin, end = (int(t[own[number]]) / 1e9 for t in (step.actions.start_ns, step.actions.end_ns))
        assert found.zoomed
        assert all(begin <= bar.start_s and bar.end_s <= end for bar in found.zoomed)
        lengths = {"hidden communication": 0.0, "exposed communication": 0.0}
        for bar in found.communication:
            lengths[bar.row] += bar.end_s - bar.start_s
        assert lengths["hidden communication"] * 1e9 == pytest.approx(step.actions.hidden_ns[own[number]])
        assert lengths["exposed communication"] * 1e9 == pytest.approx(step.actions.exposed_ns[own[number]])
    for wrong in (-1, len(own)):
        with pytest.raises(InputError, match=f"runs {len(own)} actions"):
            moesim.timeline(scenario, rank=2, action=wrong)


def test_the_critical_path_of_a_timeline_has_the_seconds_of_the_result() -> None:
    found, result = moesim.timeline(*PIPELINE), moesim.simulate(*PIPELINE)
    seconds: dict[str, float] = {}
    for bar in found.critical_path:
        seconds[bar.kind] = seconds.get(bar.kind, 0.0) + bar.end_s - bar.start_s
    assert seconds == pytest.approx({row.cause: row.seconds for row in result.critical_path_s})
    lit = [bar for bar in found.actions if bar.critical]
    assert 0 < len(lit) < len(found.actions)


def test_the_zoomed_pair_has_its_phases_on_two_streams() -> None:
    found = moesim.timeline(*PIPELINE, rank=3)
    assert found.zoomed_rank == 3
    streams, kinds = ({getattr(bar, name) for bar in found.zoomed} for name in ("row", "kind"))
    assert {"compute stream", "communication stream"} <= streams
    assert {"attn F", "mlp I", "mlp W", "dispatch F", "combine B"} <= kinds
    assert any(kind.startswith("wait for ") for kind in kinds)
    first_s = found.zoomed[0].start_s
    pairs = [b for b in found.actions if b.row == "3" and b.start_s <= first_s < b.end_s]
    assert [pair.kind for pair in pairs] == ["F&B"]
    assert max(bar.end_s for bar in found.zoomed) <= pairs[0].end_s + 1e-8


def test_a_timeline_of_full_resolution_and_of_a_rank_that_is_not_there() -> None:
    found = moesim.timeline(*CASES["full resolution"], rank=99)
    assert found.zoomed_rank == found.ranks - 1 and found.zoomed
    assert max(bar.end_s for bar in found.actions) == pytest.approx(found.step_s)
