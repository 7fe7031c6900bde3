"""Operators of our runs that memory limits, at the runs' own sizes, and FSDP2's copies by ranks.

    python -m lab.studies.run_operators --out DIR --seconds 150 [--only packs] [--uses gemm,copy/pack]

`run-operators.rows.jsonl`: what `moesim calibrate` measures (its pieces and clocks) for the eight runs on H200, or on H100 for the three traced
ones; GEMMs and attention only where `--uses` names them.
`packs.jsonl`: `_chunk_cat` and `split_with_sizes_copy` on one GPU with the buffers of 1 to 512 ranks, for lists of tensors that models have.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lab.scoring import own_runs
from moesim.kernels.calibrate import Options, calibrate
from moesim.kernels.calibrate.operators import FLUSH_BYTES, GRAPHED
from moesim.simulator.predict.operator_shapes import operator_shapes
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.scoreboard.runs import runs, scenario_of_run
from moesim.simulator.trace.parts import scenario_of

RANKS = (1, 2, 8, 32, 64, 128, 256, 512)
LAYERS = {
    "llama 8B": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (14336, 4096), (4096,), (4096,)],
    "llama 70B": [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (8192, 28672), (28672, 8192), (8192,), (8192,)],
    "qwen3 30B": [(128,), (128,), (4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048), (2048,), (2048,)],
    "experts": [(64, 768, 2048), (64, 2048, 768), (64, 768, 2048)],
    "head": [(128256, 4096)],
    "eight": [(32768, 1024)] * 8,
}  # fmt: skip


def scenarios(accelerator: str) -> list[Scenario]:
    """The runs of this workplace on an accelerator."""
    if accelerator != "h200-sxm":
        return [scenario_of(name) for name in ("ds16", "l8b", "q30")]
    return [scenario_of_run(run) for run in runs()] + [
        own_runs.scenario_of(name) for name in own_runs.measured()
    ]


def operators(uses: str, accelerator: str) -> list[dict[str, Any]]:
    """The distinct operators of the runs in eager code: those that memory limits, or of the uses that are named."""
    found: dict[str, dict[str, Any]] = {}
    for scenario in scenarios(accelerator):
        length = scenario.batch.sequence_length
        for shape in operator_shapes(
            scenario, (length,) if set(uses.split(",")) & set(GRAPHED) else (length, length // 4)
        ):
            use = str(shape["use"])
            wanted = use in uses.split(",") if uses else use not in GRAPHED
            if wanted and "compiled" not in shape:
                found.setdefault(repr(sorted(shape.items())), shape)
    return list(found.values())


def packs(seconds: float) -> Iterator[dict[str, Any]]:
    """Seconds of both copies, with a cold L2 and the host ahead, and of their kernels alone."""
    flush, begun = torch.empty(FLUSH_BYTES, device="cuda", dtype=torch.uint8), time.monotonic()
    for ranks in RANKS:
        for name, sizes in LAYERS.items():
            grads = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
            padded = [
                -(-size[0] // ranks) * (g.numel() // size[0]) for size, g in zip(sizes, grads, strict=True)
            ]
            out = torch.empty(ranks, sum(padded), device="cuda", dtype=torch.float32)
            half = torch.empty(ranks, sum(padded), device="cuda", dtype=torch.bfloat16)
            whole = [torch.empty(ranks, own, device="cuda", dtype=torch.bfloat16) for own in padded]
            calls = {
                "pack fp32": lambda: torch._chunk_cat(grads, dim=0, num_chunks=ranks, out=out),
                "pack bf16": lambda: torch._chunk_cat(grads, dim=0, num_chunks=ranks, out=half),
                "copy out": lambda: torch.split_with_sizes_copy(half, padded, dim=1, out=whole),
            }
            for what, call in calls.items():
                if time.monotonic() - begun > seconds:
                    return
                times, host_s = [], 0.001
                for _ in range(8):
                    flush.zero_()
                    torch.cuda._sleep(int(max(0.002, 2 * host_s) * 2e9))
                    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    marks[0].record()
                    at = time.perf_counter()
                    call()
                    host_s = time.perf_counter() - at
                    marks[1].record()
                    marks[1].synchronize()
                    times.append(marks[0].elapsed_time(marks[1]) * 1e-3)
                yield {"what": what, "list": name, "ranks": ranks, "elements": sum(g.numel() for g in grads), "padded": ranks * sum(padded),
                       "seconds": median(times[2:]), "least_s": min(times[2:]), "most_s": max(times[2:]), "host_s": host_s,
                       "device": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip
            del grads, out, half, whole
            torch.cuda.empty_cache()


def main() -> None:
    """Measure both parts into a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--only", choices=("operators", "packs"))
    parser.add_argument("--uses", default="")
    given = parser.parse_args()
    if given.only != "packs":
        calibrate(Options(
            given.out / "run-operators.yaml", quick=True, only=("operators",), budget_s=given.seconds,
            command="python -m lab.studies.run_operators", operators=partial(operators, given.uses),
        ))  # fmt: skip
    if given.only != "operators":
        with (given.out / "packs.jsonl").open("w") as file:
            for row in packs(given.seconds):
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
