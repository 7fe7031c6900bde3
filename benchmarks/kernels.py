"""Times of the communication kernels on the GPUs of this machine, beside what the links carry.

    python benchmarks/kernels.py --out results.json --stages copy,alltoall,ep,ll,sync,quantize

Check, then time: expert-parallel results are compared with their inputs at full size before any timing.
Every time is the slowest rank's, from events around the work, launched behind a gate (all launches queued,
then run); the median of the repeats is printed. Needs CuPy and Hopper GPUs of one host with peer access.

Napkin math (8 ranks, 4,096 tokens, hidden 7168, top-8 of 256, random scores): a token reaches 8 (1 -
C(224,8)/C(256,8)) = 5.30 ranks, 4.64 of them remote. FP8 row 7,168 B + side record 320 B: 4,096 x 4.64 x
7,488 = 142 MB a rank over NVLink; at 373 GB/s (the best a copy reaches in one direction) 380 us. BF16 row
14,336 B + 96 B: 274 MB, 734 us. Combine: rows only, 272 MB, 730 us.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from moesim.kernels.catalog import KERNELS
from moesim.kernels.copy import BulkShape, copy_bulk, copy_ldst, make_pairs
from moesim.kernels.expert_parallel import ExpertParallel, Shape
from moesim.kernels.inputs import bf16_rows, routing
from moesim.kernels.launch import Group
from moesim.kernels.loader import cupy
from moesim.kernels.quantization import dequantize, quantize
from moesim.kernels.timing import Gate, Summary, time_collective

COPY_SMS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 64, 132)
EP_SMS = (2, 4, 6, 8, 12, 16, 20, 24, 32)
BULK_SHAPES = (
    BulkShape(4, 12, 4, 4096),
    BulkShape(4, 6, 2, 8192),
)
Rows = list[dict[str, Any]]


class Bench:
    """The group, its gate, and the rows measured so far."""

    def __init__(self, ranks: int, repeats: int) -> None:
        """One rank a GPU."""
        self.group, self.repeats = Group(range(ranks)), repeats
        self.gate, self.rows = Gate(self.group), list[dict[str, Any]]()

    def time(self, what: str, n_bytes: float, work: Any, sms: int = 0, **more: Any) -> Summary:
        """Time work(i), print and keep a row; n_bytes (busiest rank) gives GB/s."""
        ranks = more.pop("ranks", None)
        found = time_collective(
            self.group,
            work,
            repeats=self.repeats,
            gate=self.gate,
            ranks=ranks,
            before=more.pop("before", None),
        )
        row = {
            "what": what, "sms": sms, **more, "median_us": found.median_s * 1e6, "iqr_us": found.iqr_s * 1e6,
            "least_us": found.least_s * 1e6, "repeats": found.repeats, "bytes": n_bytes,
            "gb_per_s": n_bytes / found.median_s / 1e9,
        }  # fmt: skip
        self.rows.append(row)
        extra = " ".join(f"{k}={v}" for k, v in more.items())
        print(f"{what:28s} sms={sms:3d} {row['median_us']:9.1f} us  {row['gb_per_s']:7.1f} GB/s  {extra}")
        return found


def copies(bench: Bench, n_bytes: int = 256 << 20) -> None:
    """One pair: local, push, pull; loads and stores against the bulk engine."""
    group = bench.group
    buffers = [group.symmetric((n_bytes,), "u1", 37 + i) for i in range(2)]
    ways = {"local": (0, 0)} | ({"push": (0, 1), "pull": (1, 0)} if group.ranks > 1 else {})
    for way, (source, target) in ways.items():
        pairs = make_pairs(group, 0, [(buffers[0][source], buffers[1][target])])
        for sms in COPY_SMS:
            bench.time(
                f"copy {way} ldst",
                n_bytes,
                lambda i, p=pairs, n=sms: copy_ldst(group, 0, p, n),
                sms,
                ranks=[0],
            )
            for shape in BULK_SHAPES:
                bench.time(
                    f"copy {way} bulk",
                    n_bytes, lambda i, p=pairs, n=sms, s=shape: copy_bulk(group, 0, p, n, s), sms, ranks=[0],
                    shape=astuple(shape),
                )  # fmt: skip


def all_to_all(bench: Bench, pair_bytes: int) -> None:
    """Every rank to or from all others at once, equal sizes: what a dispatch could reach at equal SMs."""
    group = bench.group
    send, receive = (group.symmetric((group.ranks, pair_bytes), "u1", 41 + i) for i in range(2))
    for way in ("push", "pull"):
        pairs = []
        for me in range(group.ranks):
            others = [(me + step) % group.ranks for step in range(1, group.ranks)]
            pushed = [(send[me][o], receive[o][me]) for o in others]
            pulled = [(send[o][me], receive[me][o]) for o in others]
            pairs.append(make_pairs(group, me, pushed if way == "push" else pulled))
        total = pair_bytes * (group.ranks - 1)
        for sms in EP_SMS:
            for shape in (None, *BULK_SHAPES):

                def work(i: int, n: int = sms, s: BulkShape | None = shape, p: Any = pairs) -> None:
                    for me in range(group.ranks):
                        copy_bulk(group, me, p[me], n, s) if s else copy_ldst(group, me, p[me], n)

                name = astuple(shape) if shape else "ldst"
                bench.time(f"all-to-all {way}", total, work, sms, shape=name, pair_bytes=pair_bytes)


def fill_inputs(ep: ExpertParallel, kind: str, seed: int) -> None:
    """Random rows, scales, routing, weights and results on every rank."""
    group, s, cp = ep.group, ep.shape, cupy()
    for rank in range(group.ranks):
        rng = np.random.default_rng(seed + rank)
        ids = routing(kind, s.tokens, s.k, s.experts, group.ranks, rng)
        with cp.cuda.Device(group.devices[rank]), group.streams[rank]:
            ep.topk_idx[rank].set(ids)
            ep.topk_w[rank].set(rng.random((s.tokens, s.k), dtype=np.float32))
            ep.weights[rank].set(rng.random((s.tokens, group.ranks), dtype=np.float32))
            ep.x[rank].set(rng.integers(0, 256, ep.x[rank].shape, dtype=np.uint8))
            block = bf16_rows(512, s.hidden, rng)
            for first in range(0, ep.capacity, 512):
                rows = ep.results[rank][first : first + 512]
                rows[...] = cp.asarray(block[: len(rows)])
        group.streams[rank].synchronize()


def check(ep: ExpertParallel, sms: int) -> None:
    """Poison, dispatch, and compare every received row with its source on the GPU."""
    group, cp = ep.group, cupy()
    group.fill(ep.recv_x, 0xEE)
    group.fill(ep.recv_side, 0xEE)
    ep.layout()
    ep.notify()
    ep.dispatch(sms)
    group.synchronize()
    for rank in range(group.ranks):
        with cp.cuda.Device(group.devices[rank]):
            for source in range(group.ranks):
                slots, base = cp.asarray(ep.slots[source])[:, rank], int(ep.bases[source][rank])
                tokens = cp.flatnonzero(slots >= 0)
                at = base + slots[tokens]
                same = (ep.recv_x[rank][at] == cp.asarray(ep.x[source])[tokens]).all()
                side = (ep.recv_side[rank][at] == cp.asarray(ep.side[source])[tokens]).all()
                if not (same and side):
                    raise SystemExit(f"dispatch wrong: source {source} to rank {rank}, {sms} SMs, {ep.shape}")


def expert_parallel(bench: Bench, tokens: int, kinds: tuple[str, ...], sms_list: tuple[int, ...]) -> None:
    """Layout, notify, dispatch and combine at DeepSeek-V3's sizes."""
    group = bench.group
    for fp8 in (True, False):
        shape = Shape(tokens, 7168, 8, 256, fp8)
        ep = ExpertParallel(group, shape)
        for kind in kinds:
            fill_inputs(ep, kind, seed=7)
            check(ep, sms_list[0])
            copies = np.array(ep.copies())
            remote = copies.copy()
            np.fill_diagonal(remote, 0)
            rows = int(max(remote.sum(axis=0).max(), remote.sum(axis=1).max()))
            tag = {
                "payload": "fp8" if fp8 else "bf16",
                "tokens": tokens,
                "routing": kind,
                "remote_rows": rows,
            }

            def reset(i: int, e: ExpertParallel = ep) -> None:
                e.group.barrier()

            wire = rows * (shape.row_bytes + shape.side_bytes)
            bench.time("layout", 0, lambda i, e=ep: e.layout(), **tag)
            bench.time("notify", 0, lambda i, e=ep: e.notify(), before=reset, **tag)
            for sms in sms_list:
                check(ep, sms)

                def whole(i: int, e: ExpertParallel = ep, n: int = sms) -> None:
                    e.notify()
                    e.dispatch(n)

                bench.time("notify + dispatch", wire, whole, sms, before=reset, **tag)
                bench.time("dispatch", wire, lambda i, e=ep, n=sms: e.dispatch(n), sms, before=reset, **tag)
                if not fp8:
                    bench.time(
                        "combine", rows * 14336, lambda i, e=ep, n=sms: e.combine(n), sms, before=reset, **tag
                    )


def synchronisation(bench: Bench) -> None:
    """A barrier of all ranks."""
    bench.time("barrier", 0, lambda i: bench.group.barrier(), before=lambda i: bench.group.barrier())


def quantisation(bench: Bench, rows: int = 16384, columns: int = 7168) -> None:
    """BF16 to E4M3 and back on one GPU; GB/s counts bytes read and written."""
    group = bench.group
    x = group.symmetric((rows, columns), "u2", 0x3C)[0]
    q, scales = group.symmetric((rows, columns), "u1")[0], group.symmetric((rows, columns // 128), "f4")[0]
    for name, work in {
        "quantize": lambda i, n: quantize(group, 0, x, q, scales, n),
        "dequantize": lambda i, n: dequantize(group, 0, q, scales, x, n),
    }.items():
        moved = sum(KERNELS[name].moved_bytes({"rows": rows, "columns": columns}))
        for sms in (*COPY_SMS, 264, 528):
            bench.time(name, moved, lambda i, n=sms, w=work: w(i, n), sms, ranks=[0])


def machine() -> dict[str, Any]:
    """GPU, driver, clocks, versions, kernel hashes."""
    cp = cupy()
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False
    )
    return {
        "nvidia_smi": asked.stdout.strip().splitlines(),
        "cuda_runtime": cp.cuda.runtime.runtimeGetVersion(),
        "cuda_driver": cp.cuda.runtime.driverGetVersion(),
        "cupy": cp.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "kernels_sha256": {name: kernel.digest() for name, kernel in KERNELS.items()},
    }


def main() -> None:
    """Run the stages named on the command line and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use (default: all)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--stages", default="sync,quantize,copy,alltoall,ep,ll")
    options = parser.parse_args()
    bench = Bench(options.ranks or cupy().cuda.runtime.getDeviceCount(), options.repeats)
    stages = {
        "sync": lambda: synchronisation(bench),
        "quantize": lambda: quantisation(bench),
        "copy": lambda: copies(bench),
        "alltoall": lambda: all_to_all(bench, 2711 * 7488),
        "ep": lambda: expert_parallel(bench, options.tokens, ("balanced",), EP_SMS),
        "ll": lambda: expert_parallel(bench, 128, ("balanced",), (8, 20, 32, 64, 128)),
    }
    result: dict[str, Any] = {"command": " ".join(__import__("sys").argv), "machine": machine()}
    for stage in options.stages.split(","):
        began = time.monotonic()
        stages[stage]()
        print(f"-- {stage}: {time.monotonic() - began:.1f} s")
        result |= {"rows": bench.rows, "machine_after": machine()["nvidia_smi"]}
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
