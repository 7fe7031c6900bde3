"""What every test shares: hypothesis without time limits, the presets simulated once, toy programs.

The simulator is imported where a fixture needs it: tests of the kernels run on machines without SimPy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from moesim.simulator.chunk import OverlapOrder
    from moesim.simulator.cost.table import Mode, SyncCost
    from moesim.simulator.engine.execute import Execution
    from moesim.simulator.engine.program import Program
    from moesim.simulator.model.operator import BlockKind, Phase
    from moesim.simulator.prepare import Prepared
    from moesim.simulator.result import Result
    from moesim.simulator.schedules import Schedule

    Run = tuple[Prepared, Execution, Result]

# Time limits per example make tests fail on a loaded machine; nothing here asserts wall time.
settings.register_profile("moesim", deadline=None)
# In CI the same examples every time: a red build is about the change, not about luck.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "moesim")


@lru_cache(maxsize=2)
def _run(preset: str) -> Run:
    from moesim.simulator.engine.execute import execute
    from moesim.simulator.prepare import prepare
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.simulate import summarise

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
    order: OverlapOrder | None = None,
) -> Program:
    """A program whose phases last what the functions say, in nanoseconds (True: in a pair).

    MoE blocks have transfers where `transfer_ns` is above 0; transfers and sends move `bytes_` each over
    links of `rate` bytes/s. `clock[rank][member]` are time factors, `loads[block][member]` relative rows.
    """
    from moesim.simulator.chunk import EP_PHASES, OVERLAP_ORDERS
    from moesim.simulator.cost.table import CostTable, PhaseCost, SyncCost, TransferCost
    from moesim.simulator.engine.program import Variation, compile_program

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
    chosen = order or OVERLAP_ORDERS["deepseek-v3"]
    return compile_program(
        schedule, blocks, costs, chosen, Variation(factors, rows, rows, 0.0, 0), rate, rate
    )


@pytest.fixture(scope="session")
def toy() -> Callable[..., Program]:
    """See `build_toy`."""
    return build_toy


class Outcome(NamedTuple):
    """What one call of the command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """The command line in an empty folder, in this process."""
    from moesim.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, *capsys.readouterr())

    return call
