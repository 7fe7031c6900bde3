"""Stages of kernels.py: what each measures, on which sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any, Protocol

import numpy as np

from moesim.kernels.catalog import KERNELS
from moesim.kernels.copy import copy_bulk, copy_ldst, make_pairs
from lab.benchmarks.cuda_cpp import combine_cuda, copy_cuda, dispatch_cuda
from moesim.kernels.expert_parallel import DispatchTuning, ExpertParallel, Shape
from tests.kernels.kernel_references import bf16_rows, routing
from moesim.kernels.launch import GpuGroup
from moesim.kernels.launch import cupy
from moesim.kernels.expert_parallel import LowLatency
from moesim.kernels.copy import dequantize, quantize
from lab.benchmarks.collective_times import Summary
from moesim.kernels.expert_parallel import CombineTuning, HopTuning, TwoHop

COPY_SMS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 64, 132)
EP_SMS = (2, 4, 6, 8, 12, 16, 20, 24, 32)
HIDDEN, TOP_K, EXPERTS = 7168, 8, 256  # DeepSeek-V3


class Bench(Protocol):
    """What a stage uses of the script."""

    group: GpuGroup

    def time(
        self, what: str, n_bytes: float, work: Callable[[int], None], sms: int = 0, **more: Any
    ) -> Summary:
        """Time, print and keep one row; n_bytes of the busiest rank gives GB/s."""


def nothing(bench: Bench) -> None:
    """Two events with nothing between them, and a barrier of all ranks: what every time below contains."""
    align = lambda i: bench.group.barrier()  # noqa: E731
    bench.time("nothing", 0, lambda i: None, before=align)
    bench.time("barrier", 0, lambda i: bench.group.barrier(), before=align)


def copies(bench: Bench, n_bytes: int = 256 << 20) -> None:
    """One pair: local, push, pull; PTX loads and stores, PTX bulk engine, CUDA C++."""
    group = bench.group
    buffers = [group.symmetric((n_bytes,), "u1", 37 + i) for i in range(2)]
    ways = {"local": (0, 0)} | ({"push": (0, 1), "pull": (1, 0)} if group.ranks > 1 else {})
    for way, (source, target) in ways.items():
        pairs = make_pairs(group, 0, [(buffers[0][source], buffers[1][target])])
        for sms in COPY_SMS:
            rungs: dict[str, Callable[[int], None]] = {
                "ldst": lambda i, p=pairs, n=sms: copy_ldst(group, 0, p, n),
                "bulk": lambda i, p=pairs, n=sms: copy_bulk(group, 0, p, n),
                "cuda": lambda i, p=pairs, n=sms: copy_cuda(group, 0, p, n),
            }
            for name, work in rungs.items():
                bench.time(f"copy {way} {name}", n_bytes, work, sms, ranks=[0])


def all_to_all(bench: Bench, pair_bytes: int = 2711 * 7552) -> None:
    """Every rank to or from all others at once: what a dispatch of equal bytes could reach at equal SMs."""
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
            for name, copy in {"ldst": copy_ldst, "bulk": copy_bulk}.items():

                def work(i: int, n: int = sms, f: Any = copy, p: Any = pairs) -> None:
                    for me in range(group.ranks):
                        f(group, me, p[me], n)

                bench.time(f"all-to-all {way} {name}", total, work, sms, pair_bytes=pair_bytes)


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
        group.streams[rank].synchronize()
    fill_results(ep, seed)


def fill_results(ep: ExpertParallel, seed: int) -> None:
    """Random BF16 result rows on every rank."""
    group, cp = ep.group, cupy()
    for rank in range(group.ranks):
        block = bf16_rows(512, ep.shape.hidden, np.random.default_rng(seed + rank))
        with cp.cuda.Device(group.devices[rank]), group.streams[rank]:
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


def wire_rows(ep: ExpertParallel) -> int:
    """Rows that cross the links of the busiest rank, sent or received."""
    remote = np.array(ep.copies())
    np.fill_diagonal(remote, 0)
    return int(max(remote.sum(axis=0).max(), remote.sum(axis=1).max()))


def expert_parallel(
    bench: Bench,
    tokens: int = 4096,
    kinds: tuple[str, ...] = ("balanced",),
    sms_list: tuple[int, ...] = EP_SMS,
) -> None:
    """Layout, notify, dispatch and combine at DeepSeek-V3's sizes, PTX and CUDA C++."""
    group = bench.group
    for fp8 in (True, False):
        ep = ExpertParallel(group, Shape(tokens, HIDDEN, TOP_K, EXPERTS, fp8))
        size = ep.shape.row_bytes + ep.shape.side_bytes
        for kind in kinds:
            fill_inputs(ep, kind, seed=7)
            check(ep, sms_list[0])
            rows = wire_rows(ep)
            tag: dict[str, Any] = {"payload": "fp8" if fp8 else "bf16", "tokens": tokens, "routing": kind}
            tag |= {"remote_rows": rows, "before": lambda i: group.barrier()}
            bench.time("layout", 0, lambda i, e=ep: e.layout(), **tag)
            bench.time("notify", 0, lambda i, e=ep: e.notify(), **tag)
            for sms in sms_list:
                check(ep, sms)

                def whole(i: int, n: int = sms, e: ExpertParallel = ep) -> None:
                    e.notify()
                    e.dispatch(n)

                def cuda(i: int, n: int = sms, e: ExpertParallel = ep) -> None:
                    e.notify()
                    dispatch_cuda(e, n)

                bench.time("notify + dispatch", rows * size, whole, sms, **tag)
                bench.time("dispatch", rows * size, lambda i, n=sms, e=ep: e.dispatch(n), sms, **tag)
                bench.time("notify + dispatch cuda", rows * size, cuda, sms, **tag)
                if not fp8:
                    wire = rows * 2 * HIDDEN
                    bench.time("combine", wire, lambda i, n=sms, e=ep: e.combine(n), sms, **tag)
                    bench.time("combine cuda", wire, lambda i, n=sms, e=ep: combine_cuda(e, n), sms, **tag)


def tunings(bench: Bench, tokens: int = 4096) -> None:
    """How the dispatch kernel divides an SM's shared memory: warps, stages, depth, group."""
    group = bench.group
    choices = {
        True: ((2, 8, 2, 2), (2, 15, 4, 2), (2, 30, 4, 1), (2, 7, 2, 4)),
        False: ((2, 8, 2, 1), (2, 16, 4, 1), (1, 16, 4, 1), (2, 8, 2, 2)),
    }
    for fp8, shapes in choices.items():
        ep = ExpertParallel(group, Shape(tokens, HIDDEN, TOP_K, EXPERTS, fp8))
        fill_inputs(ep, "balanced", seed=7)
        ep.layout()
        wire = wire_rows(ep) * (ep.shape.row_bytes + ep.shape.side_bytes)
        for shape in shapes:
            tuning = DispatchTuning(*shape)
            for sms in (6, 8, 12, 16, 20, 24):

                def work(i: int, n: int = sms, t: DispatchTuning = tuning, e: ExpertParallel = ep) -> None:
                    e.notify()
                    e.dispatch(n, tuning=t)

                name = "fp8" if fp8 else "bf16"
                bench.time(
                    "notify + dispatch tuned", wire, work, sms, payload=name, tuning=astuple(tuning),
                    before=lambda i: group.barrier(),
                )  # fmt: skip


def low_latency(bench: Bench) -> None:
    """Decode-sized batches: cast, slots and dispatch in one launch; combine."""
    group, rng = bench.group, np.random.default_rng(3)
    for tokens in (1, 8, 32, 64, 128, 256):
        ll = LowLatency(group, Shape(tokens, HIDDEN, TOP_K, EXPERTS, fp8=True))
        ids = [routing("balanced", tokens, TOP_K, EXPERTS, group.ranks, rng) for _ in range(group.ranks)]
        group.write(ll.topk_idx, ids)
        group.write(ll.x, [bf16_rows(tokens, HIDDEN, rng) for _ in range(group.ranks)])
        group.write(ll.results, [bf16_rows(group.ranks * tokens, HIDDEN, rng) for _ in range(group.ranks)])
        ll.dispatch(min(tokens, 128))
        group.synchronize()
        counts = np.array([c.get()[ll.half] for c in ll.recv_counts])
        np.fill_diagonal(counts, 0)
        rows = int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))
        tag: dict[str, Any] = {"tokens": tokens, "remote_rows": rows, "before": lambda i: group.barrier()}
        for sms in (8, 16, 32, 64, 128):
            wire = rows * (HIDDEN + ll.shape.side_bytes)
            bench.time("dispatch_ll", wire, lambda i, n=sms, e=ll: e.dispatch(n), sms, **tag)
            bench.time("combine_ll", rows * 2 * HIDDEN, lambda i, n=sms, e=ll: e.combine(n), sms, **tag)


def check_two_hop(hops: TwoHop, sms: int) -> None:
    """Rows and side records end where a one-hop dispatch puts them, bit for bit (compared on the GPUs)."""
    ep, cp = hops.ep, cupy()
    ep.notify()
    ep.dispatch(sms)
    hops.group.synchronize()
    kept = []
    for rank, device in enumerate(hops.group.devices):
        with cp.cuda.Device(device):
            total = int(ep.received[rank][-1])
            kept.append((ep.recv_x[rank][:total].copy(), ep.recv_side[rank][:total].copy()))
    hops.group.fill(ep.recv_x, 0xEE)
    hops.group.fill(ep.recv_side, 0xEE)
    hops.notify()
    hops.dispatch(sms)
    hops.group.synchronize()
    for rank, device in enumerate(hops.group.devices):
        with cp.cuda.Device(device):
            rows, side = kept[rank]
            total = len(rows)
            if not ((ep.recv_x[rank][:total] == rows).all() and (ep.recv_side[rank][:total] == side).all()):
                raise SystemExit(f"two-hop dispatch wrong: rank {rank}, {sms} SMs, {hops.shape}")


HOP_SMS = (4, 8, 12, 16, 20, 24)
COMBINE_RINGS = (
    (14336, 7168, 8, 8, 16),
    (14336, 7168, 10, 8, 16),
    (14336, 7168, 5, 8, 16),
    (14336, 7168, 8, 8, 8),
    (14336, 7168, 8, 8, 4),
)
"""relay_part, owner_part, relay_stages, owner_stages, chunk of CombineTuning."""


def two_hop(bench: Bench, tokens: int = 4096) -> None:
    """Virtual nodes: dispatch and combine over two hops, beside one hop between the same ranks."""
    group = bench.group
    for node_size in (n for n in (1, 2, 4) if group.ranks % n == 0 and group.ranks > n):
        for fp8 in (True, False):
            hops = TwoHop(group, Shape(tokens, HIDDEN, TOP_K, EXPERTS, fp8), node_size)
            ep = hops.ep
            fill_inputs(ep, "balanced", seed=7)
            hops.layout()
            check_two_hop(hops, 8)
            one, moved = wire_rows(ep), hops.forwarded()
            sent_on, received = max(a for a, _ in moved), max(b for _, b in moved)
            tag: dict[str, Any] = {"nodes": f"{hops.node_count}x{node_size}", "tokens": tokens}
            tag |= {"forwarded_rows": sent_on, "rail_rows": received, "before": lambda i: group.barrier()}
            size, row = ep.shape.row_bytes + ep.shape.side_bytes, 2 * HIDDEN
            for sms in HOP_SMS:

                def both(i: int, n: int = sms, h: TwoHop = hops) -> None:
                    h.notify()
                    h.dispatch(n)

                def single(i: int, n: int = sms, e: ExpertParallel = ep) -> None:
                    e.notify()
                    e.dispatch(n)

                tag["payload"] = "fp8" if fp8 else "bf16"
                bench.time("two-hop dispatch", (received + sent_on) * size, both, sms, **tag)
                bench.time("one-hop dispatch", one * size, single, sms, **tag)
                if not fp8:
                    wire = (received + sent_on) * row
                    bench.time("two-hop combine", wire, lambda i, n=sms, h=hops: h.combine(n), sms, **tag)
                    bench.time("one-hop combine", one * row, lambda i, n=sms, e=ep: e.combine(n), sms, **tag)


def hop_tunings(bench: Bench, tokens: int = 4096) -> None:
    """How the two-hop dispatch divides an SM: rows of a chunk, forwarding warps."""
    group = bench.group
    if group.ranks < 4:
        return
    for fp8, shapes in {
        True: ((4, 2, 17), (6, 2, 11), (6, 1, 11), (7, 1, 9)),
        False: ((2, 1, 9), (3, 1, 6)),
    }.items():
        hops = TwoHop(group, Shape(tokens, HIDDEN, TOP_K, EXPERTS, fp8), 2)
        fill_inputs(hops.ep, "balanced", seed=7)
        hops.layout()
        tag: dict[str, Any] = {"payload": "fp8" if fp8 else "bf16", "before": lambda i: group.barrier()}
        for sms in HOP_SMS:
            for shape in shapes:
                cut = HopTuning(*shape)

                def work(i: int, n: int = sms, t: HopTuning = cut, h: TwoHop = hops) -> None:
                    h.notify()
                    h.dispatch(n, tuning=t)

                bench.time("two-hop dispatch tuned", 0, work, sms, tuning=shape, **tag)
            for rings in () if fp8 else COMBINE_RINGS:
                use = CombineTuning(*rings)
                bench.time(
                    "two-hop combine tuned", 0, lambda i, n=sms, h=hops, t=use: h.combine(n, tuning=t), sms,
                    tuning=astuple(use), **tag,
                )  # fmt: skip


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
        for sms in COPY_SMS:
            bench.time(name, moved, lambda i, n=sms, w=work: w(i, n), sms, ranks=[0])
