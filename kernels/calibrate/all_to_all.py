"""Measures expert-parallel dispatch and combine, and a plain push of as many bytes, by SMs and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
TOKENS = 4096
"""Tokens per rank of the reference point, at which the profile's rate against SMs is taken."""
SMS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32)
QUICK_SMS = (2, 4, 8, 16, 20, 24)
OTHER_TOKENS = (128, 512, 1024, 2048, 8192)
OPERATIONS = ("dispatch_fp8", "combine", "dispatch_bf16")


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    def task(operation: str, tokens: int, sms: int) -> dict[str, Parameter]:
        return {"operation": operation, "tokens": tokens, "sms": sms, "ranks": facts.gpus}

    operations = OPERATIONS[:2] if quick else OPERATIONS
    tasks = [task(o, TOKENS, n) for o in operations for n in (QUICK_SMS if quick else SMS)]
    others = (512, 1024) if quick else OTHER_TOKENS
    tasks += [task(o, t, n) for t in others for o in operations for n in ((8, 20) if quick else (4, 8, 20))]
    tasks += [task("push", TOKENS, n) for n in ((8, 20) if quick else SMS[4:])]
    return tasks


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    if p["operation"] == "push":
        return _push(session, p)
    fp8 = p["operation"] == "dispatch_fp8"
    ep, received_bytes = session.keep(
        ("ep", p["tokens"], p["ranks"], fp8), lambda: _set_up(session, p["tokens"], p["ranks"], fp8)
    )
    if p["operation"] == "combine":
        times = session.time(p["ranks"], lambda i: ep.combine(p["sms"]), before=lambda i: ep.group.barrier())
    else:
        times = session.time(p["ranks"], lambda i: ep.dispatch(p["sms"]), before=lambda i: ep.notify())
    return Sample(times, {"bytes": received_bytes, "crossing": 1.0 - 1.0 / p["ranks"]})


def _set_up(session: Any, tokens: int, ranks: int, fp8: bool) -> tuple[Any, float]:
    """(buffers after one dispatch of random data with random balanced routing, mean bytes received).

    Received bytes count every row once with its scales, rows from the own rank included.
    """
    from moesim.kernels.expert_parallel import ExpertParallel, Shape
    from moesim.kernels.loader import cupy

    group = session.group(ranks)
    experts = EXPERTS // ranks * ranks
    shape = Shape(tokens, HIDDEN, TOP_K, experts, fp8)
    ep = ExpertParallel(group, shape)
    rng = np.random.default_rng(20261120)
    for rank in range(ranks):
        chosen = rng.random((tokens, experts)).argpartition(-TOP_K, axis=1)[:, -TOP_K:]
        with cupy().cuda.Device(session.devices[rank]):
            ep.topk_idx[rank].set(np.ascontiguousarray(chosen, dtype=np.int32))
            ep.topk_w[rank].set(rng.random((tokens, TOP_K), dtype=np.float32))
            ep.weights[rank].set(rng.random((tokens, ranks), dtype=np.float32))
        for array in (ep.x[rank], ep.results[rank]):
            fill_numbers(session, rank, array)
    group.synchronize()
    ep.layout()
    ep.notify()
    ep.dispatch(20)
    rows = sum(sum(row) for row in ep.copies()) / ranks
    return ep, rows * (shape.row_bytes + shape.scale_bytes)


def fill_numbers(session: Any, rank: int, array: Any) -> None:
    """Fill with random bits that read as BF16 between 1e-9 and 2, never infinite or NaN."""
    from moesim.kernels.loader import cupy

    cp = cupy()
    with cp.cuda.Device(session.devices[rank]):
        words = array.reshape(-1).view(cp.uint16)
        words[...] = cp.random.randint(0x3000, 0x4000, size=words.size, dtype=cp.uint16)
        cp.cuda.Device().synchronize()


def _push(session: Any, p: Mapping[str, Any]) -> Sample:
    """Time every rank copying to all its peers at once: the bytes of an FP8 dispatch without its logic."""
    from moesim.kernels.copy import copy_ldst, make_pairs

    ranks = p["ranks"]
    group = session.group(ranks)
    distinct = ranks * (1.0 - (1.0 - 1.0 / ranks) ** TOP_K)
    each = int(p["tokens"] * distinct / ranks * (HIDDEN + HIDDEN // 32)) // 16 * 16

    def build() -> list[Any]:
        targets = [[session.random(r, each) for _ in range(ranks)] for r in range(ranks)]
        return [
            make_pairs(
                group,
                rank,
                [(session.random(rank, each), targets[peer][rank]) for peer in range(ranks) if peer != rank],
            )
            for rank in range(ranks)
        ]

    pairs = session.keep(("push", p["tokens"], ranks), build)

    def work(i: int) -> None:
        for rank in range(ranks):
            copy_ldst(group, rank, pairs[rank], p["sms"])

    times = session.time(ranks, work, before=lambda i: group.barrier())
    return Sample(times, {"bytes": float(each * (ranks - 1)), "crossing": 1.0})


MEASUREMENT = Grid(
    name="all_to_all",
    title="expert-parallel dispatch and combine",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.4,
    setup_s=15.0,
    min_gpus=2,
)
