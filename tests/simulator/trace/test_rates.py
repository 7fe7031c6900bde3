"""What small built traces teach, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.trace import read
from moesim.simulator.trace.rates import Row, learn

BF16 = ["c10::BFloat16"] * 2


def op(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def launched(
    kernel: str, call: float, ts: float, dur: float, number: int, stream: int = 7, **more: Any
) -> list[Any]:
    launch = op("cudaLaunchKernel", call, 1, correlation=number) | {"cat": "cuda_runtime"}
    args = {"correlation": number, "stream": stream, "device": 0, **more}
    return [launch, {**op(kernel, ts, dur, **args), "cat": "kernel", "pid": 0, "tid": stream}]


def write(path: Path, events: list[Any], rank: int = 0) -> Path:
    path.write_text(
        json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}, indent=1)
    )
    return path


def called(
    number: int, name: str, kernel: str, ts: float, dur: float, dims: list[Any], **more: Any
) -> list[Any]:
    sizes = {"Input Dims": dims, "Input type": BF16, "External id": number, **more}
    return [
        op(name, ts, 2, **sizes),
        *launched(kernel, ts + 1, ts + 3, dur, number, **{"External id": number}),
    ]


def taught(
    tmp_path: Path, events: list[Any], operators: Any = (), gpu: str = "NVIDIA H100"
) -> dict[str, Row]:
    marked = [{**op("ProfilerStep#1", 0, 5000), "cat": "user_annotation"}, *events]
    path = write(tmp_path / "t.json", marked)
    text = json.loads(path.read_text()) | {"deviceProperties": [{"name": gpu}] * 2}
    path.write_text(json.dumps(text))
    rows = learn(read(path), operators).rows
    return {str(row["parameters"].get("use") or row["parameters"]["operation"]): row for row in rows}


def test_a_gemm_beside_a_collective_counts_as_its_equals_alone(tmp_path: Path) -> None:
    """Three equal GEMMs, one of them slower beside an all-reduce: the row holds the time alone."""
    events = []
    for n, dur in enumerate((20, 30, 20)):
        events += called(n + 1, "aten::mm", "nvjet_a", 100 * n + 10, dur, [[4096, 512], [512, 1024]])
    events += launched("ncclDevKernel_AllReduce_Sum_bf16", 105, 110, 40, 9, stream=9)
    row = taught(tmp_path, events)["gemm"]
    assert row["seconds"] == pytest.approx(20e-6)
    assert (row["parameters"]["m"], row["parameters"]["n"], row["parameters"]["k"]) == (4096, 1024, 512)
    assert row["count"] == 3


def test_products_that_the_model_joins_have_the_time_of_their_parts(tmp_path: Path) -> None:
    """Queries of 1,024 and keys of 512 columns: the joint operator takes the sum of both."""
    events = [
        *called(1, "aten::mm", "nvjet_a", 10, 40, [[4096, 512], [512, 1024]]),
        *called(2, "aten::mm", "nvjet_b", 100, 30, [[4096, 512], [512, 512]]),
    ]
    joined = {"use": "gemm", "m": 4096, "n": 1536, "k": 512, "groups": 1, "bytes": 1.0}
    row = taught(tmp_path, events, [joined])["gemm"]
    assert row["parameters"]["n"] == 1536
    assert row["seconds"] == pytest.approx(70e-6)
    assert row["sizes_from"] == "scenario"


def test_norm_activation_and_sum_are_over_the_bytes_that_the_model_counts(tmp_path: Path) -> None:
    size = [4096, 512]
    events = [
        *called(1, "aten::_fused_rms_norm", "vectorized_layer_norm_kernel", 10, 8, [size, [], [512], []]),
        *called(2, "aten::mm", "nvjet_a", 100, 40, [[4096, 512], [512, 1024]]),
        *called(3, "aten::silu", "silu_kernel", 200, 5, [size]),
        *called(4, "aten::mul", "vectorized_elementwise_kernel", 300, 7, [size, size]),
    ]
    rows = taught(tmp_path, events)
    elements = 4096 * 512
    assert rows["norm/eager_forward"]["parameters"]["bytes"] == 4 * elements
    assert rows["swiglu/eager_forward"]["parameters"]["bytes"] == 10 * elements
    assert rows["swiglu/eager_forward"]["seconds"] == pytest.approx(12e-6)


def test_two_ranks_give_the_time_of_one_call_though_their_calls_have_equal_numbers(tmp_path: Path) -> None:
    size = [4096, 512]
    events = [
        {**op("ProfilerStep#1", 0, 5000), "cat": "user_annotation"},
        *called(1, "aten::silu", "silu_kernel", 10, 5, [size]),
        *called(2, "aten::mm", "nvjet_a", 100, 40, [[4096, 512], [512, 1024]]),
    ]
    for rank in (0, 1):
        file = write(tmp_path / f"rank{rank}.json", events, rank)
        text = json.loads(file.read_text()) | {"deviceProperties": [{"name": "NVIDIA H100"}] * 2}
        file.write_text(json.dumps(text))
    rows = {row["parameters"]["use"]: row for row in learn(read(tmp_path)).rows}
    assert rows["swiglu/eager_forward"]["seconds"] == pytest.approx(5e-6)
    assert rows["swiglu/eager_forward"]["count"] == 2


def test_biases_of_experts_are_no_permutes(tmp_path: Path) -> None:
    """Four experts of hidden 512: rows of tokens are moved; repeated biases and sums of them stay out."""
    rows, wide = [4096, 512], [4096, 1024]
    events = [
        *called(1, "aten::index", "vectorized_gather_kernel", 10, 8, [rows, []]),
        *called(2, "aten::gather", "vectorized_gather_kernel", 50, 30, [[4, 512], [], rows, []]),
        *called(3, "aten::index_put_", "index_elementwise_kernel", 90, 40, [wide, []]),
        *called(4, "aten::_grouped_mm", "cutlass_grouped_gemm", 150, 40, [rows, [4, 512, 1024], [4]]),
    ]
    taught_rows = taught(tmp_path, events)
    assert taught_rows["permute/eager_expand"]["seconds"] == pytest.approx(8e-6)


def test_one_rank_gives_the_shortest_of_equal_collectives_as_a_bound(tmp_path: Path) -> None:
    said = {"Collective name": "all_gather", "In msg nelems": 10**6, "Out msg nelems": 2 * 10**6,
            "dtype": "BFloat16", "Process Group Ranks": "[0, 1]"}  # fmt: skip
    events = called(1, "aten::mm", "nvjet_a", 10, 40, [[4096, 512], [512, 1024]])
    for n, dur in enumerate((90, 30)):
        events += launched(
            "ncclDevKernel_AllGather_RING_LL", 200 * n + 100, 200 * n + 110, dur, n + 5, stream=9, **said
        )
    row = taught(tmp_path, events)["all_gather"]
    assert row["seconds"] == pytest.approx(30e-6)
    assert "upper bound" in row["sizes_from"]


def test_a_trace_without_sizes_says_what_cannot_be_learnt(tmp_path: Path) -> None:
    events = [op("aten::mm", 10, 2), *launched("nvjet_a", 11, 13, 20, 1)]
    with pytest.raises(InputError, match=r"1 of 1 GEMMs .*record_shapes=True"):
        taught(tmp_path, events)


def test_graph_replays_teach_nothing(tmp_path: Path) -> None:
    events = called(1, "aten::mm", "nvjet_a", 10, 40, [[4096, 512], [512, 1024]])
    events[-1]["args"]["graph id"] = 3
    with pytest.raises(InputError, match="without graph replay"):
        taught(tmp_path, events)


def test_ranks_of_two_runs_are_refused(tmp_path: Path) -> None:
    """No kernel of one rank is a kernel of the other."""
    for rank, kernel in enumerate(("nvjet_a", "nvjet_b")):
        write(
            tmp_path / f"rank{rank}.json",
            called(1, "aten::mm", kernel, 10, 40, [[4096, 512], [512, 1024]]),
            rank,
        )
    with pytest.raises(InputError, match="two runs"):
        learn(read(tmp_path))
