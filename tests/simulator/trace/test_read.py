from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from trace_files import launched, op, step, write

from moesim.hwmodels.errors import InputError
from moesim.simulator.trace import CLASSES, PHASES, StepTrace, read


def test_a_step_is_read_with_classes_shapes_and_times(tmp_path: Path) -> None:
    rank = read(write(tmp_path / "t.json", step())).ranks[0]
    assert [CLASSES[n] for n in rank.events["cls"]] == ["gemm", "gemm", "wgrad_gemm", "all_reduce"]
    assert [PHASES[n] for n in rank.events["phase"][:3]] == ["forward", "backward", "backward"]
    assert rank.names[rank.events["shape"][0]] == "64x32x16"
    found = rank.steps[0]
    assert (found["wall_ns"], found["busy_ns"], found["exposed_communication_ns"]) == (80_000, 70_000, 10_000)
    assert sum(found["idle_by_cause_ns"].values()) == found["idle_ns"] == 10_000
    assert found["idle_by_cause_ns"]["launch_bound"] == 10_000


def test_a_copy_hides_no_communication(tmp_path: Path) -> None:
    """HTA and TraceLens count copies apart from compute too."""
    copy = {**launched("Memcpy DtoD", 71, 75, 20, 5, stream=11)[1], "cat": "gpu_memcpy"}
    found = read(write(tmp_path / "t.json", [*step(), copy])).ranks[0].steps[0]
    assert found["exposed_communication_ns"] == 10_000
    assert (found["exposed_copy_ns"], found["compute_ns"], found["busy_ns"]) == (5_000, 60_000, 75_000)


def test_whole_microseconds_since_1970_stay_whole(tmp_path: Path) -> None:
    events = [{**event, "ts": event["ts"] + 1_661_938_466_265_087} for event in step()]
    got = read(write(tmp_path / "t.json", events)).ranks[0].events["start"]
    assert got.tolist() == [1000 * (1_661_938_466_265_087 + ts) for ts in (10, 40, 60, 70)]


def test_the_routers_product_and_an_activation_are_told_by_their_neighbours(tmp_path: Path) -> None:
    """A product before scores and their choice is the router's; one before an activation is not."""
    named = [
        ("aten::mm", "nvjet_a"), ("aten::sigmoid", "sigmoid_kernel"), ("aten::topk", "gatherTopK"),
        ("aten::_grouped_mm", "grouped_gemm"), ("aten::sigmoid", "sigmoid_kernel"),
        ("aten::mul", "elementwise_kernel"), ("aten::_grouped_mm", "grouped_gemm"),
        ("aten::mm", "nvjet_b"), ("aten::sigmoid", "sigmoid_kernel"), ("aten::mm", "nvjet_c"),
    ]  # fmt: skip
    events = []
    for n, (name, kernel) in enumerate(named):
        events += [op(name, 10 * n, 5), *launched(kernel, 10 * n + 1, 10 * n + 3, 5, n + 1)]
    rank = read(write(tmp_path / "t.json", events)).ranks[0]
    assert [CLASSES[n] for n in rank.events["cls"]] == [
        "gate_gemm", "topk", "topk", "grouped_gemm", "swiglu", "swiglu", "grouped_gemm",
        "gemm", "elementwise", "gemm",
    ]  # fmt: skip


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_packed_files_read_like_plain_ones(tmp_path: Path, pack: Any) -> None:
    plain = write(tmp_path / "t.json", step())
    packed = tmp_path / "packed"
    packed.write_bytes(pack(plain.read_bytes()))
    assert np.array_equal(read(plain).ranks[0].events, read(packed).ranks[0].events)


def test_a_recomputed_product_inside_a_gradient_is_no_gradient(tmp_path: Path) -> None:
    events = step()
    events += [op("aten::mm", 83, 5, **{"Sequence number": 9, "Input Dims": [[64, 16], [16, 32]]})]
    events += launched("nvjet_tst_d", 84, 95, 20, 8)
    engine = next(event for event in events if "evaluate_function" in event["name"])
    engine["dur"] = 70
    rank = read(write(tmp_path / "t.json", events)).ranks[0]
    assert PHASES[rank.events["phase"][-1]] == "recompute"
    assert CLASSES[rank.events["cls"][-1]] == "gemm"


def test_a_cut_file_gives_what_stands_before_the_cut_and_says_where(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json", step()).read_bytes()
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole[: whole.index(b"ncclDev")])
    trace = read(cut)
    assert len(trace.ranks[0].events) == 3
    assert any("the file ends inside its list of events, at byte" in note for note in trace.notes)


def test_a_cut_packed_file_gives_what_could_be_unpacked(tmp_path: Path) -> None:
    packed = gzip.compress(write(tmp_path / "t.json", step() * 200).read_bytes())
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(packed[: len(packed) * 3 // 4])
    trace = read(cut)
    assert len(trace.ranks[0].events) > 100
    assert any("the compressed stream breaks" in note for note in trace.notes)


def test_an_interleaved_file_says_where_it_breaks_and_goes_on(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json", step()).read_bytes()
    place = whole.index(b'"nvjet_tst_b"')
    broken = tmp_path / "broken.json"
    broken.write_bytes(whole[:place] + b'"nvj{"ph": "X", ' + whole[place:])
    trace = read(broken)
    assert len(trace.ranks[0].events) == 3
    assert any(note.startswith("broken at byte") for note in trace.notes)


def test_two_ranks_are_aligned_by_their_collectives(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", step(), 0)
    later = step()
    for event in later:
        event["ts"] += 1000
    late = next(event for event in later if event["name"].startswith("nccl"))
    late["ts"], late["dur"] = late["ts"] + 15, 5
    write(tmp_path / "rank1.json", later, 1)
    trace = read(tmp_path)
    assert trace.offsets_ns == (0, -1_000_000)
    assert [(row["waiting_ns"], row["transfer_ns"]) for row in trace.matched] == [(15_000, 5_000), (0, 5_000)]


def test_kernels_of_a_graph_replay_are_not_attributed(tmp_path: Path) -> None:
    events = step()
    next(event for event in events if event["name"] == "cudaLaunchKernel")["name"] = "cudaGraphLaunch"
    trace = read(write(tmp_path / "t.json", events))
    assert trace.ranks[0].events["op"][0] == -1
    assert any("1 of 4 events come from graph replays" in note for note in trace.notes)


def test_rules_of_the_user_come_first(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n- {name: nvjet_tst_c, cls: permute}\n")
    rank = read(write(tmp_path / "t.json", step()), rules).ranks[0]
    assert CLASSES[rank.events["cls"][2]] == "permute"
    rules.write_text("rules:\n- {name: nvjet_tst_c, cls: permutation}\n")
    with pytest.raises(InputError, match="permutation"):
        read(tmp_path / "t.json", rules)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("hello", "neither Kineto"),
        ('{"traceEvents": []}', "no trace events"),
        ('{"other": 1}', "no list 'traceEvents'"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}',
         "no kernel of a GPU"),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "ts": 2, "cat": "kernel", "name": "a", "dur": 1}]}',
         "stands twice"),
        ("SQLite format 3\0" + "x" * 200, "SQLite"),
        ('{"traceEvents": [' + "[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=why):
        read(path)


KERNEL = (
    '{"ph": "X", "cat": "kernel", "name": "nvjet", "ts": 10, "dur": 5, "args": {"device": 0, "stream": 7}}'
)


@pytest.mark.parametrize(
    ("old", "new", "events", "note"),
    [
        ("10", "NaN", 1, "1 events without a usable time"),
        ("10", "1e300", 1, "1 events without a usable time"),
        ("5", "-5", 1, "1 events without a usable time"),
        ("nvjet", "\\ud800", 2, "begin before"),
        ('"device": 0', '"device": 99999999999', 2, "no step"),
        ("7}", "7, \\u0000", 1, "ends inside its list of events"),
        ("nvjet", "bwd" * 10_000 + "mla" * 10_000, 2, "begin before"),
        ("nvjet", "triton_poi_fused" + "_to_copy" * 400 + "_x", 2, "begin before"),
    ],
)
def test_an_odd_event_is_read_or_left_out_and_said(
    tmp_path: Path, old: str, new: str, events: int, note: str
) -> None:
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{KERNEL}, {KERNEL.replace(old, new, 1)}]}}')
    trace = read(path)
    assert len(trace.ranks[0].events) == events
    assert any(note in said for said in trace.notes)
    json.dumps(trace.table(), allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("", "usable time"),
        ("(9, 5, 0, 7, 1, 1)", "usable time"),
        ("(null, 5, 0, 7, 1, 1)", "cannot be read as an Nsight"),
        ("('a', 5, 0, 7, 1, 1)", "cannot be read as an Nsight"),
        ("(1e300, 1e301, 0, 7, 1, 1)", "cannot be read as an Nsight"),
    ],
)
def test_an_export_with_unusable_rows_is_refused(tmp_path: Path, rows: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read(nsight(tmp_path / "t.sqlite", rows))


@pytest.mark.parametrize("size", [True, -3, 10**60, None, [1], "x"])
def test_sizes_that_are_no_numbers_give_no_shape(tmp_path: Path, size: Any) -> None:
    events = step()
    for event in events:
        if "Input Dims" in event.get("args", {}):
            event["args"]["Input Dims"] = [[64, size], [size, 32]]
    trace = read(write(tmp_path / "t.json", events))
    assert {row["shape"] for row in trace.table()["ranks"][0]["gemms"]} == {""}


def nsight(path: Path, rows: str, *more: str) -> Path:
    columns = "start, end, deviceId, streamId, correlationId, demangledName"
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("create table StringIds (id, value)")
        base.execute(f"create table CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
        for text in (f"insert into CUPTI_ACTIVITY_KIND_KERNEL values {rows}" if rows else "select 1", *more):
            base.execute(text)
    return path


def test_a_view_of_an_export_is_never_run(tmp_path: Path) -> None:
    endless = (
        "create view CUPTI_ACTIVITY_KIND_RUNTIME as with recursive c(x) as (select 1 union all select x + 1 "
        "from c) select x start, x end, 1 globalTid, x correlationId, 1 nameId from c"
    )
    trace = read(nsight(tmp_path / "t.sqlite", "(1, 5, 0, 7, 1, 1)", endless))
    assert len(trace.ranks[0].raw.host) == 0 and len(trace.ranks[0].events) == 1


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", step())
    write(tmp_path / "b.json", step())
    with pytest.raises(InputError, match="both are rank 0"):
        read(tmp_path)


def test_a_rank_beyond_its_world_is_refused_and_a_name_that_contradicts_is_noted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rank 5 is not below its world size 2"):
        read(write(tmp_path / "t.json", step(), rank=5))
    folder = tmp_path / "both"
    folder.mkdir()
    write(folder / "rank1.json", step(), 0)
    write(folder / "rank2.json", step(), 1)
    trace = read(folder)
    assert [rank.raw.source for rank in trace.ranks] == ["rank1.json", "rank2.json"]
    assert any("its name says rank 2, its content rank 1" in note for note in trace.notes)


def test_sqlite_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("create table StringIds (id, value)")
    with pytest.raises(InputError, match="not an Nsight Systems export"):
        read(path)


def test_kernels_that_overlap_on_a_stream_are_noted_and_count_once(tmp_path: Path) -> None:
    events = [*step(), *launched("nvjet_tst_d", 15, 20, 20, 9)]
    trace = read(write(tmp_path / "t.json", events))
    assert any("1 kernels begin before the one before them" in note for note in trace.notes)
    assert trace.ranks[0].steps[0]["busy_ns"] == 80_000


def test_a_jump_of_the_clock_is_noted(tmp_path: Path) -> None:
    events = [*step(), *launched("nvjet_tst_d", 60, 5e6, 20, 9)]
    trace = read(write(tmp_path / "t.json", events))
    assert any("a jump of the clock?" in note for note in trace.notes)
    events[2]["ts"] = 500  # the first kernel's launch, now after its end
    trace = read(write(tmp_path / "t.json", events))
    assert any("1 of 5 kernels end before they are launched" in note for note in trace.notes)


def two_ranks(folder: Path, late: float, lost: bool) -> StepTrace:
    """Two ranks with two all-reduces and a gather each; the second all-reduce of rank 1 is late, or lost."""
    for rank in (0, 1):
        events = step()
        again = {"Collective name": "allreduce", "Process Group Ranks": "[0, 1]"}
        moved = late * rank
        gather = {"Collective name": "allgather", "Process Group Ranks": "[0, 1]"}
        if not (lost and rank):
            events += launched("ncclDevKernel_AllReduce_x", 90, 100 + moved, 10, 8, stream=9, **again)
        events += launched("ncclDevKernel_AllGather_x", 95, 120 + moved, 10, 9, stream=9, **gather)
        write(folder / f"rank{rank}.json", events, rank)
    return read(folder)


def test_lost_collectives_are_noted_and_their_kind_is_not_matched(tmp_path: Path) -> None:
    trace = two_ranks(tmp_path, 0, lost=True)
    assert {row["class"] for row in trace.matched} == {"all_gather"}
    assert any("different numbers of collectives (2 to 3)" in note for note in trace.notes)


def test_a_clock_that_jumps_between_collectives_is_noted(tmp_path: Path) -> None:
    assert not any("on one rank before they begin" in note for note in two_ranks(tmp_path, 0, False).notes)
    trace = two_ranks(tmp_path, 40, lost=False)
    assert any("end on one rank before they begin on another" in note for note in trace.notes)


def node(number: int, needs: list[int], kind: int = 4) -> bytes:
    name = b"kernel"
    body = bytes([8, number, 18, len(name)]) + name + bytes([24, kind, 42, len(needs), *needs, 56, 3])
    return bytes([len(body)]) + body


def test_an_execution_trace_is_ordered_and_a_cycle_is_refused(tmp_path: Path) -> None:
    head = b"\x08\x0a\x06schema"
    path = tmp_path / "chakra.0.et"
    path.write_bytes(head + node(2, [1]) + node(1, []))
    rank = read(path).ranks[0]
    assert (rank.events["end"] - rank.events["start"]).tolist() == [3000, 3000]
    packed = tmp_path / "chakra.3.et.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert (read(packed).ranks[0].raw.rank, len(read(packed).ranks[0].events)) == (3, 2)
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(InputError, match="cannot be read"):
        read(packed)
    path.write_bytes(head + node(2, [1]) + node(1, [2]))
    with pytest.raises(InputError, match="a cycle of dependencies"):
        read(path)
