from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_records import execute, records_of

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost, SyncCost, TransferCost
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.program import MemberVariation, PricedSchedule
from moesim.simulator.engine.records import Execution, SendRecord
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.predict.report import compute_ns
from moesim.simulator.predict.trace import (
    TraceInfo,
    chrome_trace,
    microseconds,
    send_lanes,
    shown_places,
    write_trace,
)
from moesim.simulator.schedules import build
from moesim.simulator.schedules.template import OVERLAP_ORDERS

GOLDEN = Path(__file__).parents[2] / "golden" / "trace-small.json"

COMPUTE: dict[Phase, tuple[float, float]] = {
    "attn F": (400e-6, 0.0),
    "mlp F": (50e-6, 200e-6),
    "mlp I": (50e-6, 200e-6),
    "mlp W": (50e-6, 250e-6),
    "attn I": (600e-6, 0.0),
    "attn W": (150e-6, 0.0),
    "dispatch F": (5e-6, 0.0),
}
TRANSFERS: tuple[Phase, ...] = ("dispatch F", "combine F", "combine B", "dispatch B")
PP, MEMBERS, MICROBATCHES = 2, 2, 4

INFO = TraceInfo(
    name="small",
    gpus=((0, 1), (2, 3)),
    group_sizes={"ep": MEMBERS, "model": 2, "dp": MEMBERS, "world": 4},
    elements={"in": 1000, "out": 4000, "send": 1000},
    notes={"seed": 0},
)


def small(schedule: str = "dualpipe", exposed_s: float = 0.0, send_s: float = 20e-6) -> Execution:
    """Two pipeline ranks of two GPUs with one MoE layer each, hand-made prices."""
    kind: BlockKind = "moe"
    slower: dict[Mode, float] = {"alone": 1.0, "sms_reserved": 1.1, "overlapped": 1.1}
    compute = {
        (kind, phase, mode): PhaseCost(fixed * factor + exposed_s, row, exposed_s)
        for phase, (fixed, row) in COMPUTE.items()
        for mode, factor in slower.items()
    }
    transfer = {
        (kind, phase, mode): TransferCost(4e-6, 150e-6, 120e-6, 6e6, 18e6)
        for phase in TRANSFERS
        for mode in slower
    }
    sync = (SyncCost(100e-6, 10e-6, 50e-6, 40e-6),) * PP
    costs = CostTable(compute, transfer, 1e6, send_s, sync)
    loads = np.array([[[0.9, 1.1]] * MICROBATCHES, [[1.2, 0.8]] * MICROBATCHES])
    clock = np.array([[1.0, 1.01], [0.99, 1.0]])
    order = OVERLAP_ORDERS["deepseek-v3"]
    priced = PricedSchedule(build(schedule, PP, MICROBATCHES), ((kind,), (kind,)), costs, order)
    variation = MemberVariation(clock, loads, np.ones_like(loads), 0.0, 0)
    return execute(compile_program(priced, variation, FoldedLinkMap(PP, 50e9, 200e9, True)))


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def span(event: dict[str, Any]) -> tuple[int, int]:
    """Begin and end in nanoseconds, cut off as Perfetto's importer does."""
    begin = int(event["ts"] * 1000.0)
    return begin, begin + int(event["dur"] * 1000.0)


def is_communication(event: dict[str, Any]) -> bool:
    return bool(event["name"].startswith("nccl")) and "Kernel" in event["name"]


@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b", "zb-h1"])
def test_slices_of_a_thread_nest(schedule: str) -> None:
    trace = chrome_trace(shown_places(small(schedule, exposed_s=30e-6), INFO, members=range(MEMBERS)))
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in slices(trace):
        threads[event["pid"], event["tid"]].append(span(event))
    assert {pid for pid, _ in threads} == {0, 1, 2, 3}
    for spans in threads.values():
        free = 0
        for begin, end in sorted(spans):
            assert begin >= free and end > begin, "slices of one stream must not overlap at all"
            free = end


def test_overlapping_sends_get_their_own_lanes() -> None:
    sends = [SendRecord(0, 1, "0F0", 0, 10), SendRecord(0, 1, "0F1", 5, 12), SendRecord(0, 1, "0F2", 10, 11)]
    assert [lane for _, lane in send_lanes(sends)] == [0, 1, 0]


def test_every_task_of_every_action_is_a_slice() -> None:
    execution = small()
    trace = chrome_trace(shown_places(execution, INFO))
    actions = [e for e in slices(trace) if e["cat"] == "user_annotation"]
    assert len(actions) == sum(len(rank) for rank in records_of(execution))
    payloads = [e for e in slices(trace) if e["tid"] == 2 and "nic bytes" in e["args"]]
    records = [record for rank in records_of(execution) for record in rank]
    assert len(payloads) == sum(t.transfer is not None for r in records for t in r.step.code.tasks)


@pytest.mark.parametrize("exposed_s", [0.0, 30e-6])
def test_compute_slices_add_up_to_the_compute_time_of_the_report(exposed_s: float) -> None:
    execution = small("1f1b", exposed_s)
    trace = chrome_trace(shown_places(execution, INFO, members=range(MEMBERS)))
    for rank in range(PP):
        shown = [
            span(e)[1] - span(e)[0]
            for e in slices(trace)
            if e["tid"] == 1 and e["name"] != "optimizer" and e["pid"] in INFO.gpus[rank]
        ]
        want = compute_ns(execution.table)[execution.table.rank == rank].sum()
        assert sum(shown) / MEMBERS == pytest.approx(want, rel=1e-6)


def test_everything_that_communicates_is_classified_as_communication() -> None:
    for event in slices(chrome_trace(shown_places(small(exposed_s=30e-6), INFO))):
        if event["cat"] == "kernel":
            assert is_communication(event) == (event["tid"] != 1)
            assert isinstance(event["args"]["stream"], int)
            assert isinstance(event["args"]["correlation"], int)
            assert ("Collective name" in event["args"]) == is_communication(event)


def test_barrier_wait_and_payload_are_separate() -> None:
    trace = chrome_trace(shown_places(small(), INFO, members=range(MEMBERS)))
    waits = [e for e in slices(trace) if e["name"] == "ncclDevKernel_notify_combine_F"]
    ends = defaultdict(set)
    for event in waits:
        args = event["args"]
        ends[args["stage"], args["microbatch"], event["pid"] // MEMBERS].add(span(event)[1])
    assert waits and all(len(e) == 1 for e in ends.values()), "members leave a barrier together"
    assert len({e["dur"] for e in waits}) > 1, "and reach it at different times"


def test_arrows_point_from_sends_to_the_actions_that_need_them() -> None:
    trace = chrome_trace(shown_places(small(), INFO))
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 2 * MICROBATCHES
    actions = {(e["pid"], e["ts"]) for e in slices(trace) if e["tid"] == 0}
    sends = {(e["pid"], e["tid"], e["ts"]) for e in slices(trace) if e["tid"] >= 8}
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] < end["ts"]
        assert (end["pid"], end["ts"]) in actions
        assert (start["pid"], start["tid"], start["ts"]) in sends


def test_without_pipeline_traffic_there_are_no_sends() -> None:
    trace = chrome_trace(shown_places(small(send_s=0.0), INFO))
    assert not [e for e in trace["traceEvents"] if e["tid"] >= 8 or e["ph"] in "sf"]


def test_ranks_and_members_are_chosen() -> None:
    execution = small()
    assert {e["pid"] for e in chrome_trace(shown_places(execution, INFO, [1], [1]))["traceEvents"]} == {3}
    assert {e["pid"] for e in chrome_trace(shown_places(execution, INFO))["traceEvents"]} == {0, 2}
    for ranks, members, legal in (
        ([2], [0], "ranks 0 to 1"),
        ([0], [-1], "members 0 to 1"),
        ([], [0], "none"),
    ):
        with pytest.raises(InputError, match=legal):
            chrome_trace(shown_places(execution, INFO, ranks, members))


def test_the_small_trace_is_the_golden_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, shown_places(small(), INFO))
    assert path.read_text() == GOLDEN.read_text()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_two_runs_write_the_same_bytes(tmp_path: Path, name: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_trace(tmp_path / folder / name, shown_places(small(), INFO))
    first, second = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
    assert first == second
    text = gzip.decompress(first) if name.endswith("gz") else first
    assert json.loads(text) == json.loads(json.dumps(chrome_trace(shown_places(small(), INFO))))


def test_a_bad_target_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    execution = small()
    (tmp_path / "folder.json").mkdir()
    for name, why in (
        ("trace.txt", "unknown extension"),
        ("absent/trace.json", "does not exist"),
        ("folder.json", "is a folder"),
    ):
        with pytest.raises(InputError, match=why):
            write_trace(tmp_path / name, shown_places(execution, INFO))
    with pytest.raises(InputError, match="ranks"):
        write_trace(tmp_path / "trace.json", shown_places(execution, INFO, ranks=[9]))
    assert [p.name for p in tmp_path.iterdir()] == ["folder.json"]


@given(st.integers(0, 10**14))
def test_microseconds_keep_every_nanosecond(ns: int) -> None:
    assert int(microseconds(ns) * 1000.0) == ns
    assert microseconds(ns) == pytest.approx(ns / 1000.0, rel=1e-15)


def _covered(spans: list[tuple[int, int]]) -> set[int]:
    """Whole microseconds inside any span."""
    return {us for begin, end in spans for us in range(begin // 1000, end // 1000)}
