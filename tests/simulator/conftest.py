"""What tests of the simulator share: the presets simulated once, toy programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import pytest

from moesim.simulator.chunk import EP_PHASES, OVERLAP_ORDERS, OverlapOrder
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost, SyncCost, TransferCost
from moesim.simulator.engine.execute import Execution, execute
from moesim.simulator.engine.program import Program, Variation, compile_program
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.prepare import Prepared, prepare
from moesim.simulator.result import Result
from moesim.simulator.scenario import load_scenario
from moesim.simulator.schedules import Schedule
from moesim.simulator.simulate import summarise

Run = tuple[Prepared, Execution, Result]


@lru_cache(maxsize=2)
def _run(preset: str) -> Run:
    prepared = prepare(load_scenario(preset))
    execution = execute(prepared.program)
    return prepared, execution, summarise(prepared, execution)


@pytest.fixture(scope="session")
def home_case() -> Run:
    """Plan, execution and result of deepseek-v3-2048xh800 (about a second, once a session)."""
    return _run("deepseek-v3-2048xh800")


@pytest.fixture(scope="session")
def trace_pair() -> Run:
    """Plan, execution and result of deepseek-v3-trace-pair."""
    return _run("deepseek-v3-trace-pair")


# -- toy programs: chosen durations for every phase -------------------------------------------------

COMPUTE: dict[BlockKind, tuple[Phase, ...]] = {
    "embedding": ("attn F", "attn W"),
    "dense": ("attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W"),
    "moe": ("attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W"),
    "mtp": ("attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W"),
    "head": ("mlp F", "mlp I", "mlp W"),
}

MODES: tuple[Mode, ...] = ("alone", "quiet", "beside")

NS = 1e9


def build_toy(
    schedule: Schedule,
    blocks: Sequence[Sequence[BlockKind]],
    compute_ns: Callable[[BlockKind, Phase, bool], float],
    transfer_ns: Callable[[Phase, bool], float] = lambda phase, overlapped: 0.0,
    *,
    launch_ns: int = 0,
    send_ns: float = 0.0,
    bytes_: float = 0.0,
    rate: float = 1e30,
    clock: Sequence[Sequence[float]] | None = None,
    loads: Mapping[int, Sequence[float]] | None = None,
    sync: Sequence[SyncCost] | None = None,
    order: OverlapOrder = OVERLAP_ORDERS["deepseek-v3"],
) -> Program:
    """A program whose phases last what the functions say, in nanoseconds (True: in a pair).

    MoE blocks have transfers where `transfer_ns` is above 0; transfers and sends move `bytes_` each over
    links of `rate` bytes/s. `clock[rank][member]` are time factors, `loads[block][member]` relative rows.
    """
    kinds = {kind for stage in blocks for kind in stage}
    compute = {
        (kind, phase, mode): PhaseCost(compute_ns(kind, phase, mode != "alone") / NS)
        for kind in kinds
        for phase in COMPUTE[kind]
        for mode in MODES
    }
    phases: list[Phase] = ["dispatch F", "combine F", "combine B", "dispatch B"]
    assert set(phases) == EP_PHASES
    transfer = {
        (kind, phase, mode): TransferCost(
            launch_ns / NS, transfer_ns(phase, mode != "alone") / NS, 0.0, bytes_, 0.0
        )
        for kind in kinds & {"moe", "mtp"}
        for phase in phases
        for mode in MODES
        if transfer_ns(phase, mode != "alone") > 0.0
    }
    pp = schedule.pp
    factors = np.ones((pp, 1)) if clock is None else np.array(clock, dtype=np.float64)
    members = factors.shape[1]
    routed = sum(kind in ("moe", "mtp") for stage in blocks for kind in stage)
    rows = np.ones((routed, schedule.microbatches, members))
    for number, values in (loads or {}).items():
        rows[number] = np.array(values)[None, :]
    costs = CostTable(compute, transfer, bytes_, send_ns / NS, tuple(sync or [SyncCost(0, 0, 0, 0)] * pp))
    return compile_program(schedule, blocks, costs, order, Variation(factors, rows, rows, 0.0, 0), rate, rate)


@pytest.fixture(scope="session")
def toy() -> Callable[..., Program]:
    """See `build_toy`."""
    return build_toy
