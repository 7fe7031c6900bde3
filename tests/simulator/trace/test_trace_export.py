from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trace import CLASSES, StepTrace, read
from moesim.simulator.trace.classes import COMMUNICATION
from moesim.simulator.trace.export import export_step, host_calls
from moesim.simulator.trace.formats import _messages, _node, _Work
from moesim.simulator.trace.predicted import RECEIVES, predicted_trace

FIGURES = ("wall_ns", "busy_ns", "compute_ns", "communication_ns", "exposed_communication_ns", "idle_ns")


TINY = [
    "cluster={node: hgx-h800, nodes: 4, network: mpft-ib-400g, name: 32xh800, price_per_gpu_hour: $2/h}",
    "parallel={tp: 1, pp: 2, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "stages.blocks=[embedding moe, moe head]", "batch.sequences=64",
]  # fmt: skip


@pytest.fixture(scope="module")
def step() -> ExecutedStep:
    """Two MoE blocks, one a rank of the pipeline, and as many micro-batches as DualPipe needs."""
    return run_step(load_scenario("deepseek-v3-2048xh800", TINY))


@pytest.fixture(scope="module")
def want(step: ExecutedStep) -> StepTrace:
    return predicted_trace(step)


@pytest.fixture(scope="module")
def folder(step: ExecutedStep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("exports")
    export_step(step, to / "kineto", "kineto", [0, 16])
    export_step(step, to / "chakra", "chakra")
    return to


@pytest.fixture(scope="module")
def events(folder: Path) -> list[dict[str, Any]]:
    packed = (folder / "kineto" / "rank-00016.json.gz").read_bytes()
    listed: list[dict[str, Any]] = json.loads(gzip.decompress(packed))["traceEvents"]
    return listed


def test_our_reader_finds_the_exported_kineto_step_again(want: StepTrace, folder: Path) -> None:
    found = read(folder / "kineto")
    assert [rank.raw.rank for rank in found.ranks] == [0, 16]
    for old, new in zip(want.ranks[:2], found.ranks, strict=True):
        for key in ("start", "end", "cls", "phase", "layer"):
            assert np.array_equal(old.events[key], new.events[key]), key
        one, two = ([r.names[n] for n in r.events["shape"] if n >= 0] for r in (old, new))
        assert one == two
        assert old.raw.world == new.raw.world and old.raw.gpus_per_node == new.raw.gpus_per_node
        inside = next(comm for comm in new.raw.comms if comm.group == "ep")
        assert len(inside.ranks) == inside.size == 16 and old.raw.rank in inside.ranks
        begin, end = old.events["start"].min(), old.events["end"].max()
        assert new.steps[0]["wall_ns"] == end - begin  # the waits at both ends are no kernels
        assert [new.steps[0][key] for key in FIGURES[1:-1]] == [old.steps[0][key] for key in FIGURES[1:-1]]


def test_kernels_have_names_that_hta_and_tracelens_sort(events: list[dict[str, Any]]) -> None:
    """HTA knows communication by `^nccl.*Kernel`; TraceLens by nccl, and operators by their names."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    ops = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op"}
    for kernel in kernels:
        kind = re.search(r"moesim::(\w+)::", kernel["name"])
        assert kind and kind[1] in CLASSES
        talks = kind[1] in COMMUNICATION
        assert bool(re.match(r"^nccl.*Kernel", kernel["name"])) == talks
        assert ("Collective name" in kernel["args"]) == talks
        op = ops[kernel["args"]["External id"]]
        if kind[1] in ("gemm", "gate_gemm"):
            assert op["name"] == "aten::mm" and len(op["args"]["Input Dims"]) == 2
        if kind[1] == "attention_backward":
            assert op["name"] == "aten::_efficient_attention_backward"
    dispatch = next(e for e in kernels if "moesim::ep_dispatch" in e["name"])["args"]
    assert dispatch["Group size"] == 16 and len(json.loads(dispatch["Process Group Ranks"])) == 16
    assert dispatch["In msg nelems"] > 0 and dispatch["dtype"] == "Byte"


def test_every_kernel_has_one_call_before_it_and_calls_do_not_overlap(events: list[dict[str, Any]]) -> None:
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len(calls) == len(kernels) > 500
    assert all(calls[k["args"]["correlation"]]["ts"] <= k["ts"] for k in kernels)
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op")
    assert all(one[1] < other[0] or one[1] - one[0] <= 0.001 for one, other in pairwise(spans))
    flows = {ph: {e["id"] for e in events if e["ph"] == ph} for ph in "sf"}
    assert flows["s"] == flows["f"] == set(calls)


def test_a_late_host_stays_the_cause_of_its_gaps(tmp_path: Path) -> None:
    late = run_step(load_scenario("mixtral-8x7b-64xh100", [
        "parallel={pp: 1, ep: 2, microbatch: 1, zero_stage: 3}", "schedule=1f1b",
        "stages.blocks=[embedding moe*2 head]",
        "cluster=h200-8", "batch.sequences=8", "communication.kernels=nccl", "precision=bf16",
        "software.framework=torchtitan-0.2", "software.host=emerald-rapids-vm", "recompute=full",
    ]))  # fmt: skip
    want = predicted_trace(late).ranks[0].steps[0]["idle_by_cause_ns"]
    export_step(late, tmp_path / "one.json", "kineto")
    assert read(tmp_path / "one.json").ranks[0].steps[0]["idle_by_cause_ns"] == want
    assert want["launch_bound"] > 0


def test_calls_of_kernels_that_start_together_stay_in_order(want: StepTrace) -> None:
    events = want.ranks[0].events[:50].copy()
    events["start"] = events["start"][0]
    calls, lasts = host_calls(events)
    assert all(one < other for one, other in pairwise(calls)) and calls[-1] <= events["start"][0]
    assert min(lasts) >= 1


def chakra_nodes(path: Path) -> dict[int, _Work]:
    messages = _messages(path.read_bytes(), path, [])
    next(messages)
    return {node.number: node for node in (_node(text, path) for text in messages)}


def test_our_reader_finds_classes_and_times_in_the_execution_traces(want: StepTrace, folder: Path) -> None:
    for old in want.ranks:
        new = read(folder / "chakra" / f"step.{old.raw.rank}.et").ranks[0]
        assert not any("missing" in note or "cycle" in note for note in new.raw.notes)

        def work(events: Any) -> list[tuple[int, int, int]]:
            own = events[(events["cls"] != CLASSES.index("send_recv")) | (events["stream"] < RECEIVES)]
            rows = zip(own["start"].tolist(), own["end"].tolist(), own["cls"].tolist(), strict=True)
            return sorted(row for row in rows if CLASSES[row[2]] != "send_recv")

        assert work(new.events) == work(old.events)


def test_a_node_begins_when_all_that_it_needs_has_ended(folder: Path) -> None:
    """The edges are those of the schedule: in the engine's times none is broken, and few leave slack."""
    tight = total = 0
    for path in (folder / "chakra").glob("*.et"):
        nodes = chakra_nodes(path)
        for node in nodes.values():
            begin, _ = node.span_ns()
            ends = [nodes[need].span_ns()[1] for need in node.needs]
            assert all(end <= begin for end in ends), node.name
            assert (
                node.needs or node.kind == 6 or begin <= min(n.span_ns()[0] for n in nodes.values()) + 10**9
            )
            tight += bool(ends) and max(ends) == begin
            total += bool(ends)
    assert tight > 0.9 * total > 0


def test_sends_meet_their_receives_and_groups_are_listed(folder: Path) -> None:
    said: dict[str, set[tuple[Any, ...]]] = {"send": set(), "receive": set()}
    groups = json.loads((folder / "chakra" / "comm_groups.cfg").read_text())
    for path in (folder / "chakra").glob("*.et"):
        rank = int(path.name.split(".")[1])
        for node in chakra_nodes(path).values():
            own = node.attributes
            if node.kind in (5, 6):
                word = "send" if node.kind == 5 else "receive"
                key = tuple(own[name] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                assert key not in said[word] and rank == key[node.kind - 5]
                said[word].add((*key, node.span_ns()))
            if node.kind == 7 and "pg_name" in own:
                assert rank in groups[str(own["pg_name"])] and own["comm_type"] in range(10)
    assert said["send"] == said["receive"]
    assert len(said["send"]) == 8  # four micro-batches, forward and back


def test_what_cannot_be_exported_is_refused(step: ExecutedStep, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for to, form, ranks, why in (
        ("a.json", "perfetto", None, "kineto or chakra"),
        ("a.et", "kineto", [0], r"\.json"),
        ("a.json", "chakra", [0], r"\.et"),
        ("a.json", "kineto", [0, 16], "2 ranks need a folder"),
        ("a.et", "chakra", [0, 16], "2 ranks need a folder"),
        ("file", "kineto", None, "this is a file"),
        ("absent/a.json", "kineto", [0], "does not exist"),
        ("new", "chakra", [32], "GPUs 0 to 31"),
    ):
        with pytest.raises(InputError, match=why):
            export_step(step, tmp_path / to, form, ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_fleet_has_no_trace(mixed_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fleet"):
        moesim.export_trace(mixed_file, to=tmp_path / "new")
