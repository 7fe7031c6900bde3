"""Measures core attention, forward and backward, by sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

HEADS, DQK, DV = 128, 192, 128


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    lengths = (4096,) if quick else (4096, 2048, 8192)
    return [
        {"direction": d, "heads": HEADS, "length": n, "dqk": DQK, "dv": DV}
        for n in lengths
        for d in ("forward", "backward")
    ]


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.calibrate.torch_graphs import Graphs, attention

    shape = (p["heads"], p["length"], p["dqk"], p["dv"])
    backward = p["direction"] == "backward"
    graphs = session.keep(
        ("attention", *shape, backward),
        lambda: Graphs(session.devices[0], lambda: attention(*shape, backward=backward)),
    )
    times = tuple(graphs.seconds() for _ in range(session.repeats))
    return Sample(times, {"flop": graphs.work.flop})


MEASUREMENT = Grid(
    name="attention",
    title="core attention",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=1.5,
    setup_s=2.0,
    libraries=("cupy", "torch"),
)
