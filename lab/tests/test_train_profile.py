"""The tables of a profiled step and of the allocator's history, from small hand-made events."""

from __future__ import annotations

from typing import Any

import pytest

from lab.studies import train_profile


def kernel(name: str, start: float, length: float, stream: int = 7, external: int = 0) -> dict[str, Any]:
    args = {"stream": stream, "External id": external}
    return {"cat": "kernel", "name": name, "ts": start, "dur": length, "args": args}


def test_busy_time_counts_overlapped_kernels_once() -> None:
    events = [kernel("gemm", 100, 10), kernel("ncclDevKernel", 105, 20, 9), kernel("gemm", 130, 5)]
    table = train_profile.kernel_table(events)
    assert table["busy_s"] == pytest.approx(30e-6)  # 100 to 125 and 130 to 135
    assert table["busy_without_nccl_s"] == pytest.approx(15e-6)
    assert table["span_s"] == pytest.approx(35e-6)
    assert table["by_name"][1] == {"name": "gemm", "stream": 7, "seconds": pytest.approx(15e-6), "count": 2}


def operator(name: str, start: float, external: int, thread: int, shapes: Any = "") -> dict[str, Any]:
    args = {"External id": external, "Input Dims": shapes}
    return {"cat": "cpu_op", "name": name, "ts": start, "dur": 1, "tid": thread, "args": args}


def test_kernels_take_the_operator_and_thread_of_their_launch() -> None:
    events = [
        operator("aten::mm", 5, 4, thread=2),
        operator("aten::mm", 0, 3, thread=1, shapes=[[4, 8], [8, 2]]),
        kernel("gemm", 1, 2, external=3),
        kernel("gemm", 6, 1.5, external=4),
        kernel("copy", 8, 1, external=9),
    ]
    rows = train_profile.operators_of_kernels(events)["by_operator"]
    assert [(row["operator"], row["shapes"], row["thread"], row["kernel"]) for row in rows] == [
        ("aten::mm", "[[4,8],[8,2]]", "main", "gemm"),
        ("aten::mm", "", "autograd", "gemm"),
        ("?", "", "", "copy"),
    ]  # fmt: skip


def test_the_peak_lies_between_an_allocation_and_a_free() -> None:
    mib = 2**20
    before = {"segments": [{"stream": 0, "device": 0, "blocks": [
        {"address": 1, "size": 3 * mib, "state": "active_allocated"},
        {"address": 2, "size": 9 * mib, "state": "inactive"},
    ]}]}  # fmt: skip
    trace = [
        {"action": "alloc", "addr": 10, "size": 5 * mib, "stream": 0},
        {"action": "alloc", "addr": 11, "size": 2 * mib, "stream": 4},
        {"action": "free_requested", "addr": 10, "size": 5 * mib, "stream": 0},
        {"action": "free_completed", "addr": 10, "size": 5 * mib, "stream": 0},
        {"action": "alloc", "addr": 10, "size": 1 * mib, "stream": 0},
    ]
    segment = {"stream": 0, "device": 0, "total_size": 20 * mib, "active_size": 6 * mib, "blocks": []}
    found = train_profile.memory_at_peak({"segments": [segment], "device_traces": [trace]}, before)
    assert (found["start_bytes"], found["peak_bytes"], found["peak_at"]) == (3 * mib, 10 * mib, [1, 5])
    assert found["active_at_peak"]["0/<=8MiB"] == {"blocks": 1, "bytes": 5 * mib}
    assert found["active_at_peak"]["4/<=2MiB"] == {"blocks": 1, "bytes": 2 * mib}
    assert found["segments_after"]["0/<=32MiB"]["bytes"] == 20 * mib
