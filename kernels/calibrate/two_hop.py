"""Measures dispatch and combine over two virtual nodes: the rates of a relay, by number of SMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moesim.kernels.calibrate.all_to_all import EXPERTS, HIDDEN, TOKENS, TOP_K, fill_numbers
from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

SMS = (2, 4, 8, 12, 16, 20, 24, 32)
QUICK_SMS = (4, 8, 16, 20, 24)
OPERATIONS = ("dispatch_2hop", "combine_2hop")


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    node_size = facts.gpus // 2 if facts.gpus % 2 == 0 else 1
    return [
        {"operation": o, "tokens": TOKENS, "sms": n, "ranks": facts.gpus, "node_size": node_size}
        for o in OPERATIONS
        for n in (QUICK_SMS if quick else SMS)
    ]


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    hops, forwarded, received = session.keep(
        ("2hop", p["tokens"], p["ranks"]),
        lambda: _set_up(session, p["tokens"], p["ranks"], p["node_size"]),
    )
    if p["operation"] == "combine_2hop":
        times = session.time(
            p["ranks"], lambda i: hops.combine(p["sms"]), before=lambda i: hops.group.barrier()
        )
        row = 2 * HIDDEN
    else:
        times = session.time(p["ranks"], lambda i: hops.dispatch(p["sms"]), before=lambda i: hops.notify())
        row = hops.shape.row_bytes + hops.shape.scale_bytes
    return Sample(times, {"bytes": forwarded * row, "rail_bytes": received * row})


def _set_up(session: Any, tokens: int, ranks: int, node_size: int) -> tuple[Any, float, float]:
    """(buffers after one dispatch, mean rows that a relay forwards, mean rows that it takes from the rail).

    The rows are FP8 with random data and routing. A relay forwards rows to the GPUs of its node, itself
    included; the combine reduces as many.
    """
    from moesim.kernels.expert_parallel import Shape
    from moesim.kernels.loader import cupy
    from moesim.kernels.two_hop import TwoHop

    group = session.group(ranks)
    experts = EXPERTS // ranks * ranks
    hops = TwoHop(group, Shape(tokens, HIDDEN, TOP_K, experts, fp8=True), node_size)
    ep, rng = hops.ep, np.random.default_rng(20261120)
    for rank in range(ranks):
        chosen = rng.random((tokens, experts)).argpartition(-TOP_K, axis=1)[:, -TOP_K:]
        with cupy().cuda.Device(session.devices[rank]):
            ep.topk_idx[rank].set(np.ascontiguousarray(chosen, dtype=np.int32))
            ep.weights[rank].set(rng.random((tokens, ranks), dtype=np.float32))
        for array in (ep.x[rank], ep.results[rank]):
            fill_numbers(session, rank, array)
    group.synchronize()
    hops.layout()
    hops.notify()
    hops.dispatch(20)
    moved = hops.forwarded()
    return hops, float(np.mean([a for a, _ in moved])), float(np.mean([b for _, b in moved]))


MEASUREMENT = Grid(
    name="two_hop",
    title="dispatch and combine over virtual nodes",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.4,
    setup_s=8.0,
    min_gpus=2,
)
