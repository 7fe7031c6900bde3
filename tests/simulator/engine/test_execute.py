from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from step_records import execute, records_of

from moesim.simulator.cost.table import SyncCost
from moesim.simulator.engine.program import PhaseRows, PlacedStep, Program
from moesim.simulator.engine.records import Execution
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import (
    SCHEDULES,
    Schedule,
    Step,
    build,
    longest_path,
    makespan,
    parse_step,
)
from moesim.simulator.schedules.template import (
    FORWARD_CHAIN,
    INPUT_CHAIN,
    OVERLAP_ORDERS,
    WEIGHT_OF,
)

Toy = Callable[..., Program]

FEWER = settings(max_examples=40)
"""For properties that run several simulations an example."""

PHASES: tuple[Phase, ...] = (*FORWARD_CHAIN, *INPUT_CHAIN, *WEIGHT_OF)
SERIAL: dict[str, tuple[Phase, ...]] = {
    "F": FORWARD_CHAIN,
    "I": INPUT_CHAIN,
    "W": ("mlp W", "attn W"),
    "B": (*INPUT_CHAIN, "mlp W", "attn W"),
}
PAIRLESS = sorted(name for name, spec in SCHEDULES.items() if not spec.overlapped_pairs)


@st.composite
def schedules(draw: st.DrawFn, names: list[str] | None = None) -> Schedule:
    name = draw(st.sampled_from(names or sorted(SCHEDULES)))
    pp = draw(st.sampled_from([2, 4]) if name == "dualpipe" else st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if name.startswith("interleaved") else 1
    return build(name, pp, 2 * pp * draw(st.integers(1, 2)), vpp)


@st.composite
def placements(draw: st.DrawFn, schedule: Schedule) -> list[list[BlockKind]]:
    kinds: st.SearchStrategy[BlockKind] = st.sampled_from(("moe", "moe", "dense", "mtp"))
    stages: list[list[BlockKind]] = [
        draw(st.lists(kinds, min_size=1, max_size=2)) for _ in range(schedule.n_stages)
    ]
    if draw(st.booleans()):
        stages[0].insert(0, "embedding")
        stages[-1].append("head")
    return stages


Timings = dict[tuple[str, str, bool], int]
"""Nanoseconds by (block kind or "transfer", phase, overlapped?)."""

KEYS: list[tuple[str, str, bool]] = [
    (kind, phase, overlapped)
    for kind in ("embedding", "dense", "moe", "mtp", "head", "transfer")
    for phase in PHASES
    for overlapped in (False, True)
]


@st.composite
def timings(draw: st.DrawFn) -> Timings:
    """Random durations of very different sizes; only the seed shrinks."""
    random = Random(draw(st.integers(0, 10**6)))
    sizes = {key: random.choice([1, 10, 100, 1000]) * random.randint(1, 9) for key in KEYS}
    # A transfer takes a nanosecond at least; 20 leave room for members with half the load.
    return {key: 20 * value if key[0] == "transfer" else value for key, value in sizes.items()}


def make(toy: Toy, schedule: Schedule, blocks: Any, ns: Timings, **more: Any) -> Program:
    return toy(
        schedule,
        blocks,
        lambda kind, phase, o: ns[kind, phase, o],
        lambda phase, o: ns["transfer", phase, o],
        **more,
    )


# -- one path ----------------------------------------------------------------------------------------


def task_graph(program: Program, send_ns: int = 0) -> nx.DiGraph:
    """Every member's share of every task as a node, built from the schedule alone.

    A node's weight is on its outgoing edges. Written without a look at the engine: streams are in order,
    a transfer starts when its slowest member is there, an action starts when the one before has ended and
    its inputs came, a pair hands its outputs on when their chain is done, a full backward when all is. Where
    sends are awaited, every output leaves at the end of its action, and the rank is free when it has left.
    """
    graph = nx.DiGraph()
    schedule, members = program.schedule, range(program.members)

    def edge(before: Any, after: Any, weight: int = 0) -> None:
        if not graph.has_edge(before, after) or graph[before][after]["weight"] < weight:
            graph.add_edge(before, after, weight=weight)

    outputs: dict[tuple[str, int, int], tuple[Any, int]] = {}
    inputs: list[tuple[tuple[str, int, int], Any, int]] = []
    for rank, steps in enumerate(program.ranks):
        for position, step in enumerate(steps):
            here = (rank, position)
            _add_tasks(graph, edge, program, here, step)
            sends = schedule.awaits_sends and any(
                schedule.rank_of(stage, key[2]) != rank
                for key in _gives(step, here)
                if 0 <= (stage := key[1] + (1 if key[0] == "F" else -1)) < schedule.n_stages
            )
            for m in members:
                edge(("end", *here, m), ("free", *here, m), send_ns if sends else 0)
                if position:
                    edge(("free", rank, position - 1, m), ("start", *here, m))
                for key in _needs(step, schedule.n_stages):
                    inputs.append((key, here, m))
            for key, node in _gives(step, here).items():
                outputs[key] = (("end", *here) if schedule.awaits_sends else node, rank)
    for key, here, m in inputs:
        node, rank = outputs[key]
        edge((*node, m), ("start", *here, m), 0 if rank == here[0] else send_ns)
    return graph


def _add_tasks(
    graph: nx.DiGraph, edge: Callable[..., None], program: Program, here: tuple[int, int], step: PlacedStep
) -> None:
    last: dict[bool, Any] = {}
    tasks = step.code.tasks
    for number, task in enumerate(tasks):
        micro = step.microbatches[task.side]
        for m in range(program.members):
            ready, done = ("ready", *here, number, m), ("done", *here, number, m)
            edge(("start", *here, m), ready)
            for dep in (
                *task.deps,
                *((last[task.transfer is not None],) if (task.transfer is not None) in last else ()),
            ):
                edge(("done", *here, dep, m), ready)
            if task.transfer is None:
                edge(ready, done, int(task.rows_ns[micro, m]))
            else:
                barrier = ("barrier", *here, number)
                edge(ready, barrier, int(task.rows_ns[micro, m]))
                edge(barrier, done, task.transfer.launch_ns + int(task.transfer.member_ns[micro, m]))
            edge(done, ("end", *here, m))
        last[task.transfer is not None] = number
    for m in range(program.members):
        edge(("start", *here, m), ("end", *here, m))


def _needs(step: PlacedStep, n_stages: int) -> list[tuple[str, int, int]]:
    found = []
    if step.stages[0] > 0:
        found.append(("F", step.stages[0] - 1, step.microbatches[0]))
    if 0 <= step.stages[1] < n_stages - 1 and step.code.kind != "W":
        found.append(("B", step.stages[1] + 1, step.microbatches[1]))
    return found


def _gives(step: PlacedStep, here: tuple[int, int]) -> dict[tuple[str, int, int], Any]:
    """Node whose end hands on the activation or the gradient: the last of its chain, or all of a B."""
    tasks, found = step.code.tasks, {}
    for side, name, chain in ((0, "F", FORWARD_CHAIN), (1, "B", INPUT_CHAIN)):
        if step.stages[side] < 0 or step.code.kind == "W":
            continue
        numbers = [n for n, t in enumerate(tasks) if t.side == side and t.phase in chain]
        key = (name, step.stages[side], step.microbatches[side])
        whole = step.code.kind == "B" or not numbers
        found[key] = ("end", *here) if whole else ("done", *here, numbers[-1])
    return found


@FEWER
@given(st.data())
def test_the_engine_is_the_longest_path_over_all_tasks(toy: Toy, data: st.DataObject) -> None:
    """Pairs, sends, launches and members with clocks and loads of their own included, to the nanosecond."""
    schedule = data.draw(schedules())
    blocks = data.draw(placements(schedule))
    members = data.draw(st.integers(1, 3))
    factor = st.sampled_from([0.5, 0.9, 1.0, 1.1, 1.7])
    vector = st.lists(factor, min_size=members, max_size=members)
    routed = sum(kind in ("moe", "mtp") for stage in blocks for kind in stage)
    send_ns = data.draw(st.sampled_from([0, 1, 50, 3000]))
    program = make(
        toy, schedule, blocks, data.draw(timings()),
        clock=[data.draw(vector) for _ in range(schedule.pp)],
        loads={n: data.draw(vector) for n in range(routed)},
        send_ns=send_ns, launch_ns=data.draw(st.sampled_from([0, 7])),
    )  # fmt: skip
    execution, graph = execute(program), task_graph(program, send_ns)
    assert execution.end_ns == nx.dag_longest_path_length(graph)
    ends: dict[Any, int] = {}
    for node in nx.topological_sort(graph):
        ends[node] = max((ends[p] + graph[p][node]["weight"] for p in graph.predecessors(node)), default=0)
    for rank, done in enumerate(records_of(execution)):
        for position, record in enumerate(done):
            for number, own in enumerate(record.ends):
                assert own.tolist() == [ends["done", rank, position, number, m] for m in range(members)]


def _steps(text: str) -> list[Step]:
    return [parse_step(cell) for cell in text.split(",")]


def _later(program: Program, ns: int) -> Program:
    """The program with its first step's first task `ns` longer; durations are shared, so it gets a copy."""
    step = program.ranks[0][0]
    first = step.code.tasks[0]
    tasks = (first._replace(compute=PhaseRows.of(first.rows_ns + ns)), *step.code.tasks[1:])
    part = replace(step.code.part, tasks=tasks)
    steps = (step._replace(code=replace(step.code, tasks=tasks, part=part)), *program.ranks[0][1:])
    return replace(program, ranks=(steps, *program.ranks[1:]))


def test_the_task_graph_can_disagree(toy: Toy) -> None:
    """One nanosecond more in one phase of one micro-batch is seen by both."""
    schedule = build("dualpipe", 2, 4)
    program = toy(schedule, [["moe"], ["moe"]], lambda kind, phase, o: 100, lambda phase, o: 30)
    before = execute(program).end_ns
    program = _later(program, 1)
    assert execute(program).end_ns == nx.dag_longest_path_length(task_graph(program)) == before + 1


@given(st.data())
def test_pairs_may_hand_on_early_but_never_late(toy: Toy, data: st.DataObject) -> None:
    schedule = dataclasses.replace(data.draw(schedules(["dualpipe", "dualpipev"])), awaits_sends=False)
    blocks, ns = data.draw(placements(schedule)), data.draw(timings())
    execution = execute(make(toy, schedule, blocks, ns))
    spans = {
        (rank, str(record.step.label)): int((record.end - record.start)[0])
        for rank, records in enumerate(records_of(execution))
        for record in records
    }
    late = longest_path(schedule, lambda rank, step: spans[rank, str(step)])
    assert execution.end_ns <= makespan(late)
    awaited = execute(make(toy, dataclasses.replace(schedule, awaits_sends=True), blocks, ns))
    assert awaited.end_ns == makespan(late)


# -- pipeline sends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_rank_waits_for_its_own_sends_where_its_schedule_does(toy: Toy, name: str) -> None:
    """DualPipe, DualPipeV and 1F1B post a send after an action and wait for it before the next one."""
    schedule = build(name, 4, 8)
    blocks: list[list[BlockKind]] = [["moe"]] * schedule.n_stages
    execution = execute(toy(schedule, blocks, lambda k, p, o: 100, lambda p, o: 30.0, send_ns=9.0))
    waits = {
        rank: [
            (after.start - before.end)[0] >= 9
            for before, after in pairwise(records)
            if _crosses(schedule, rank, before.step)
        ]
        for rank, records in enumerate(records_of(execution))
    }
    awaits = name in ("dualpipe", "dualpipev", "1f1b")
    assert all(all(found) for found in waits.values()) == awaits
    ends = [int(records[-1].end[0]) for records in records_of(execution)]
    done = [sync.ready_ns for sync in execution.syncs]
    late = [_crosses(schedule, rank, records[-1].step) for rank, records in enumerate(records_of(execution))]
    assert done == [end + 9 * (awaits and one) for end, one in zip(ends, late, strict=True)]


def _crosses(schedule: Schedule, rank: int, step: PlacedStep) -> bool:
    targets = [
        (key[1] + (1 if key[0] == "F" else -1), key[2])
        for key in _gives(step, (0, 0))
        if 0 <= key[1] + (1 if key[0] == "F" else -1) < schedule.n_stages
    ]
    return any(schedule.rank_of(*target) != rank for target in targets)


def test_the_two_sends_of_a_pair_leave_together_and_share_the_port(toy: Toy) -> None:
    schedule = build("dualpipe", 2, 8)
    more: dict[str, Any] = {"bytes_": 1000.0, "rate": 1e9, "send_ns": 1000.0}
    execution = execute(toy(schedule, [["dense"], ["dense"]], lambda k, p, o: 500, **more))
    records = records_of(execution)[0]
    both = [n for n, r in enumerate(records) if r.step.code.kind == "F&B" and r.step.stages == (0, 1)]
    assert both
    for record in (records[n] for n in both):
        assert int((record.free - record.end)[0]) == 2000
    posted = {s.start for s in execution.sends if s.source == 0}
    assert {int(records[n].end[0]) for n in both} <= posted


# -- links -------------------------------------------------------------------------------------------


def test_a_send_and_a_transfer_on_one_nic_slow_each_other_down(toy: Toy) -> None:
    # Rank 0 sends 1000 bytes after each F at 1 byte/ns while its next dispatch wants the same port.
    schedule = build("gpipe", 2, 2)
    more: dict[str, Any] = {"bytes_": 1000.0, "rate": 1e9, "send_ns": 1000.0}
    program = toy(schedule, [["moe"], ["dense"]], lambda k, p, o: 1, lambda p, o: 1000.0, **more)
    record = records_of(execute(program))[0][1]
    dispatch, combine = (n for n, t in enumerate(record.step.code.tasks) if t.transfer is not None)
    # The send of micro-batch 0 and the dispatch of 1 begin 1 ns apart: both take nearly twice as long.
    assert record.finishes[dispatch] - record.begins[dispatch] == pytest.approx(2000, abs=2)
    assert record.finishes[combine] - record.begins[combine] == 1000


@FEWER
@given(st.data())
def test_contention_never_speeds_anything_up(toy: Toy, data: st.DataObject) -> None:
    schedule = data.draw(schedules(["1f1b", "zbv", "dualpipe", "interleaved-1f1b"]))
    blocks = data.draw(placements(schedule))
    ns = data.draw(timings())
    # Every transfer and send moves 1,000 bytes in at least 1,000 ns over links of 1 byte/ns.
    slow = {key: value + 1000 if key[0] == "transfer" else value for key, value in ns.items()}
    free, shared = (
        execute(make(toy, schedule, blocks, slow, bytes_=1000.0, rate=rate, send_ns=1200.0))
        for rate in (1e30, 1e9)
    )
    flows = sum(len(step.code.transfers) + 1 for steps in shared.program.ranks for step in steps)
    assert shared.end_ns >= free.end_ns - flows  # each flow is rounded to whole nanoseconds
    assert sum(shared.carried_bytes) == sum(free.carried_bytes)
    assert sum(shared.carried_bytes) == 2 * 1000.0 * (len(shared.sends) + _transfers(shared))


def _transfers(execution: Execution) -> int:
    return sum(len(record.step.code.transfers) for records in records_of(execution) for record in records)


# -- monotone ----------------------------------------------------------------------------------------


@FEWER
@given(st.data())
def test_shorter_phases_transfers_and_sends_never_end_later(toy: Toy, data: st.DataObject) -> None:
    """More SMs for compute or more bandwidth of a link shorten phases; nothing may end later for it."""
    schedule = data.draw(schedules())
    blocks = data.draw(placements(schedule))
    ns = data.draw(timings())
    better = {key: value - value // data.draw(st.integers(2, 9)) for key, value in ns.items()}
    slow, fast = (
        execute(make(toy, schedule, blocks, times, send_ns=send))
        for times, send in ((ns, 90.0), (better, 60.0))
    )
    assert fast.end_ns <= slow.end_ns


@FEWER
@given(st.data())
def test_more_microbatches_never_end_earlier(toy: Toy, data: st.DataObject) -> None:
    """Pairs of interleaved 1F1B join waits on several ranks, so that a longer run may end earlier there."""
    name = data.draw(st.sampled_from([*PAIRLESS, "dualpipe", "dualpipev"]))
    pp = data.draw(st.sampled_from([2, 4]))
    few = build(name, pp, 2 * pp)
    many = build(name, pp, 2 * pp * data.draw(st.integers(2, 3)))
    blocks = data.draw(placements(few))
    ns = data.draw(timings())
    assert execute(make(toy, many, blocks, ns)).end_ns >= execute(make(toy, few, blocks, ns)).end_ns


@FEWER
@given(st.data())
def test_more_skew_is_never_faster(toy: Toy, data: st.DataObject) -> None:
    """Fixed draws of mean 0, scaled up: durations 1/(1+cv z) are convex, and barriers take maxima."""
    schedule = data.draw(schedules(["1f1b", "zb-h1", "dualpipe"]))
    members = data.draw(st.integers(2, 4))
    draws = st.lists(st.floats(-1.0, 1.0), min_size=members, max_size=members)
    z = [data.draw(draws) for _ in range(schedule.pp)]
    z = [[value - sum(row) / members for value in row] for row in z]
    blocks: list[list[BlockKind]] = [["moe"]] * schedule.n_stages
    ends = []
    for cv in (0.0, 0.05, 0.2, 0.4):
        clock = [[1.0 / (1.0 + cv * value) for value in row] for row in z]
        program = toy(schedule, blocks, lambda k, p, o: 1_000_000.0, lambda p, o: 300_000.0, clock=clock)
        ends.append(execute(program).end_ns)
    rounding = sum(len(record) for record in schedule.ranks) * 10
    for less, more in pairwise(ends):
        assert more >= less - rounding


# -- members -----------------------------------------------------------------------------------------


def test_a_transfer_starts_at_the_slowest_member(toy: Toy) -> None:
    schedule = build("1f1b", 1, 1)
    program = toy(
        schedule, [["moe"]], lambda k, p, o: 1000, lambda p, o: 500.0, clock=[[1.0, 1.25, 0.5]], launch_ns=20
    )
    record = records_of(execute(program))[0][0]
    assert [t.phase for t in record.step.code.tasks] == list(FORWARD_CHAIN)
    assert record.ends[0].tolist() == [1000, 1250, 500]
    assert record.begins[1] == 1250
    assert record.ends[1].tolist() == [1770] * 3  # 1250 + launch + payload
    assert record.ends[2].tolist() == [2770, 3020, 2270]
    assert record.begins[3] == 3020
    assert record.ends[3].tolist() == [3540] * 3


def test_a_member_with_fewer_rows_leaves_a_transfer_earlier(toy: Toy) -> None:
    program = toy(
        build("1f1b", 1, 1), [["moe"]], lambda k, p, o: 1000, lambda p, o: 500.0,
        clock=[[1.0, 1.0]], loads={0: [0.5, 1.5]},
    )  # fmt: skip
    record = records_of(execute(program))[0][0]
    assert record.ends[1].tolist() == [1250, 1750]
    assert record.finishes[1] == 1750
    # Compute without rows of its own does not depend on the load; the next barrier meets at the slower.
    assert record.begins[3] == 2750


@FEWER
@given(st.data())
def test_equal_members_fold_to_one(toy: Toy, data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    blocks = data.draw(placements(schedule))
    ns = data.draw(timings())
    more: dict[str, Any] = {"send_ns": 2000.0, "bytes_": 900.0, "rate": 1e9}
    factors = data.draw(
        st.lists(st.sampled_from([0.8, 1.0, 1.3]), min_size=schedule.pp, max_size=schedule.pp)
    )
    ns = {key: value + 900 if key[0] == "transfer" else value for key, value in ns.items()}
    one = execute(make(toy, schedule, blocks, ns, clock=[[f] for f in factors], **more))
    four = execute(make(toy, schedule, blocks, ns, clock=[[f] * 4 for f in factors], **more))
    assert one.end_ns == four.end_ns
    for single, many in zip(records_of(one), records_of(four), strict=True):
        for a, b in zip(single, many, strict=True):
            assert b.end.tolist() == [int(a.end[0])] * 4
            assert a.finishes == b.finishes


# -- the end of the step -----------------------------------------------------------------------------


def test_end_of_step_waits_for_the_mirror_and_for_the_norm(toy: Toy) -> None:
    sync = [SyncCost(10e-9, 1e-9, 5e-9, 3e-9), SyncCost(30e-9, 1e-9, 2e-9, 4e-9)]
    for name, waits in (("1f1b", False), ("dualpipe", True)):
        blocks: list[list[BlockKind]] = [["dense"], ["dense", "dense"]]
        execution = execute(toy(build(name, 2, 4), blocks, lambda k, p, o: 100, sync=sync))
        done = [int(records[-1].end[0]) for records in records_of(execution)]
        ready = [max(done)] * 2 if waits else done
        meet = max(ready[0] + 10, ready[1] + 30)
        for rank, (record, own) in enumerate(zip(execution.syncs, ready, strict=True)):
            assert record.reduce == (own, own + (10, 30)[rank])
            assert record.norm == (meet, meet + 1)
        assert execution.end_ns == meet + 1 + max(5 + 3, 2 + 4)


def test_a_schedule_that_cannot_go_on_is_named(toy: Toy) -> None:
    # The engine does not check that a B follows its own F (the validator does); a gradient that never
    # comes is a deadlock that must not pass for a short step.
    broken = Schedule("broken", 1, ((0, 1),), (tuple(_steps("0F0,0B0")), tuple(_steps("1F0"))))
    with pytest.raises(RuntimeError, match=r"ranks \[0\] wait"):
        execute(toy(broken, [["dense"], ["dense"]], lambda k, p, o: 1))


# -- shares of a pair --------------------------------------------------------------------------------


def test_short_transfers_slow_less_compute(toy: Callable[..., Program]) -> None:
    """Four transfers of 25 ns beside six phases of 200 ns: a twelfth of the compute is slowed (eq. E20)."""
    schedule = build("interleaved-1f1b-overlapped", 1, 2)

    def program(transfer_ns: float, order: str) -> Program:
        return toy(
            schedule,
            [["moe"]],
            lambda kind, phase, overlapped: 200.0 if overlapped else 100.0,
            lambda phase, overlapped: transfer_ns,
            order=OVERLAP_ORDERS[order],
        )

    def share(made: Program) -> float | None:
        pair = next(step.code for step in made.ranks[0] if step.code.kind == "F&B")
        (value,) = {task.overlapped_share for task in pair.tasks}
        return value

    assert share(program(25.0, "megatron")) == pytest.approx(1 / 12)
    assert share(program(1000.0, "megatron")) == 1.0
    assert share(program(25.0, "deepseek-v3")) == 1.0
    alone = next(step.code for step in program(25.0, "megatron").ranks[0] if step.code.kind == "B")
    assert [task.overlapped_share for task in alone.tasks] == [pytest.approx(50 / 800)] * 6
