"""compute-sanitizer over every kernel on one GPU: memcheck, racecheck, and a planted error to be found.

    python -m lab.benchmarks.sanitize --out sanitizer.json

Needs CuPy, a Hopper GPU and compute-sanitizer (CUDA toolkit). Runs itself once under each tool: every kernel
of the catalog and the CUDA C++ counterparts, all ranks on one GPU, every buffer an allocation of its own so
that an access beside it is an error. Results are checked by the tests, not here. Exits with 1 if memcheck
found anything, if racecheck did in a kernel not in HANDED_BACK, or if the planted store was missed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from moesim.kernels.catalog import KERNELS
from moesim.kernels.copy import BulkShape, copy_bulk, copy_ldst, make_pairs
from lab.benchmarks.cuda_cpp import combine_cuda, copy_cuda, dispatch_cuda
from moesim.kernels.expert_parallel import ExpertParallel, Shape
from tests.kernels.kernel_references import bf16_rows, routing
from moesim.kernels.launch import GpuGroup, address
from moesim.kernels.launch import cupy
from moesim.kernels.expert_parallel import LowLatency
from moesim.kernels.copy import dequantize, quantize
from moesim.kernels.expert_parallel import TwoHop

TIMEOUT_S = 25.0  # kernels run many times slower under a tool
TOOLS = ("memcheck", "racecheck")
HANDED_BACK = {"combine_sys_v2", "combine_2hop_v1", "dispatch_2hop_v1"}
"""Kernels whose lanes read a stage and, after bar.warp.sync, one lane arrives at the mbarrier that frees it.

Racecheck knows what that lane had read, not what bar.warp.sync adds for the others, and reports the next load
into the stage. With an arrival of every lane the reports of combine_2hop_v1 fell from 137,000 bytes a ring to
the first use of each stage, where the loader passes a fresh barrier (2026-11-20); results are bit-exact.
"""


def expert_parallel(ranks: int, fp8: bool) -> None:
    """Layout, notify, dispatch, combine, in PTX and CUDA C++."""
    group, rng = GpuGroup([0] * ranks, TIMEOUT_S), np.random.default_rng(ranks)
    ep = ExpertParallel(group, Shape(300, 1024, 4, 8 * ranks, fp8))
    ids = [routing("balanced", 300, 4, 8 * ranks, ranks, rng) for _ in range(ranks)]
    group.write(ep.topk_idx, ids)
    group.write(ep.results, [bf16_rows(ep.capacity, 1024, rng) for _ in range(ranks)])
    ep.layout()
    for dispatch, combine in ((ep.dispatch, ep.combine), (None, None)):
        ep.notify()
        if dispatch is None or combine is None:
            dispatch_cuda(ep, 2)
            combine_cuda(ep, 2)
        else:
            dispatch(2)
            combine(2)
        group.synchronize()


def low_latency(ranks: int) -> None:
    """Both kernels of decode-sized batches, twice."""
    group, rng = GpuGroup([0] * ranks, TIMEOUT_S), np.random.default_rng(ranks)
    ll = LowLatency(group, Shape(9, 1024, 4, 8 * ranks, fp8=True))
    group.write(ll.topk_idx, [routing("balanced", 9, 4, 8 * ranks, ranks, rng) for _ in range(ranks)])
    for _ in range(2):
        ll.dispatch(3)
        ll.combine(3)
        group.synchronize()


def two_hop(ranks: int, node_size: int, fp8: bool) -> None:
    """Both kernels over virtual nodes, twice."""
    group, rng = GpuGroup([0] * ranks, TIMEOUT_S), np.random.default_rng(ranks)
    hops = TwoHop(group, Shape(37, 1024, 4, 8 * ranks, fp8), node_size)
    group.write(hops.ep.topk_idx, [routing("balanced", 37, 4, 8 * ranks, ranks, rng) for _ in range(ranks)])
    hops.layout()
    for _ in range(2):
        hops.notify()
        hops.dispatch(2)
        hops.combine(2)
        group.synchronize()


def copies() -> None:
    """Loads and stores, the bulk engine, CUDA C++; an odd size."""
    group, size = GpuGroup([0], TIMEOUT_S), (1 << 16) + 48
    source, target = group.symmetric((size,), "u1", 7)[0], group.symmetric((size,), "u1")[0]
    pairs = make_pairs(group, 0, [(source, target)])
    copy_ldst(group, 0, pairs, 3, threads=128)
    copy_bulk(group, 0, pairs, 3, BulkShape(warps=2, stages=3, depth=1, chunk_bytes=2048))
    copy_cuda(group, 0, pairs, 3)
    group.synchronize()


def small() -> None:
    """Quantisation both ways, signals, barriers."""
    group, rng = GpuGroup([0] * 2, TIMEOUT_S), np.random.default_rng(0)
    x = group.put(0, bf16_rows(37, 1024, rng))
    q, scales = group.symmetric((37, 1024), "u1")[0], group.symmetric((37, 8), "f4")[0]
    quantize(group, 0, x, q, scales, ctas=2)
    dequantize(group, 0, q, scales, x, ctas=2)
    flag = group.symmetric((4,), "u4")[0]
    group.post(0, address(flag), 1)
    group.wait(1, address(flag), 1, peer=0)
    group.barrier()
    group.synchronize()


def planted() -> None:
    """A copy that ends 64 bytes behind its target."""
    group, size = GpuGroup([0], TIMEOUT_S), 1 << 20
    source, target = group.symmetric((size,), "u1", 7)[0], group.symmetric((size,), "u1")[0]
    pairs = make_pairs(group, 0, [(source, target)])
    pairs.table.reshape(-1)[1:2] += 64
    copy_ldst(group, 0, pairs, 1)
    group.synchronize()


def every_kernel() -> None:
    """All of the above but the planted error."""
    copies()
    small()
    for ranks in (1, 2):
        expert_parallel(ranks, fp8=ranks == 2)
        low_latency(ranks)
    for ranks, node_size, fp8 in ((2, 1, True), (2, 2, False), (4, 2, True)):
        two_hop(ranks, node_size, fp8)


def run(tool: str, work: str) -> dict[str, Any]:
    """One run of this script under a tool: its errors, hazards and last lines."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", sys.executable, __file__]
    command += ["--work", work]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    found = re.search(r"ERROR SUMMARY: (\d+) error", output) or re.search(r"(\d+) hazards? displayed", output)
    return {
        "tool": tool, "work": work, "command": " ".join(["python", "lab/benchmarks/sanitize.py", *command[-2:]]),
        "errors": int(found[1]) if found else None,
        "by_kernel": dict(Counter(re.findall(r"Race reported between \w+ access at (\w+)", output))),
        "returned": done.returncode,
        "completed": "all launches completed" in output, "seconds": round(time.monotonic() - began, 1),
        "summary": output.strip().splitlines()[-3:],
    }  # fmt: skip


def main() -> None:
    """Run the tools, write and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("sanitizer.json"))
    parser.add_argument("--work", choices=("every", "planted"), help="run the kernels, without a tool")
    options = parser.parse_args()
    if options.work:
        cupy().cuda.set_allocator(None)  # no pool: memcheck then knows where each array ends
        (every_kernel if options.work == "every" else planted)()
        print("all launches completed")
        return
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, check=True)
    result: dict[str, Any] = {
        "command": "python -m lab.benchmarks.sanitize",
        "date": time.strftime("%Y-%m-%d"),
        "tool": [line for line in version.stdout.splitlines() if "ersion" in line],
        "gpu": asked.stdout.strip().splitlines()[0],
        "kernels_sha256": {name: kernel.digest() for name, kernel in KERNELS.items()},
        "handed_back": sorted(HANDED_BACK),
        "cuda_cpp": ["copy", "dispatch", "combine"],
        "runs": [run(tool, "every") for tool in TOOLS] + [run("memcheck", "planted")],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for item in result["runs"]:
        print(item["tool"], item["work"], item["errors"], "errors", item["by_kernel"], item["seconds"], "s")
    memory, races, control = result["runs"]
    clean = memory["errors"] == 0 and memory["completed"] and races["completed"]
    clean = (
        clean
        and set(races["by_kernel"]) <= HANDED_BACK
        and sum(races["by_kernel"].values()) == races["errors"]
    )
    sys.exit(0 if clean and (control["errors"] or 0) > 0 else 1)


if __name__ == "__main__":
    main()
