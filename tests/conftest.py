"""What every test shares: hypothesis without time limits, the presets simulated once, toy programs.

The simulator is imported where a fixture needs it: tests of the kernels run on machines without SimPy.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from moesim.simulator.cost.table import Mode, SyncCost
    from moesim.simulator.engine.link_map import LinkMap
    from moesim.simulator.engine.program import Program
    from moesim.simulator.engine.records import Execution
    from moesim.simulator.model.operator import BlockKind, Phase
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.step import Prepared
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.schedules import Schedule
    from moesim.simulator.schedules.template import OverlapOrder
    from moesim.simulator.scoring.published import ContextRow, Row
    from moesim.simulator.scoring.published_full_resolution import FullChecks

    Run = tuple[Prepared, Execution, Result]

T = TypeVar("T")

# Time limits per example make tests fail on a loaded machine; nothing here asserts wall time.
settings.register_profile("moesim", deadline=None)
# In CI the same examples every time: a red build is about the change, not about luck.
settings.register_profile("ci", deadline=None, derandomize=True)
# Predictions of the command line and the dashboard are kept for one run of the tests: a test is about the
# program as it is.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MOESIM_CACHE"] = tempfile.mkdtemp(prefix="moesim-tests-")
    atexit.register(shutil.rmtree, os.environ["MOESIM_CACHE"], ignore_errors=True)
settings.load_profile("ci" if os.environ.get("CI") else "moesim")


ROOT = Path(__file__).resolve().parents[1]
LONG = (
    "tests/app/e2e/",
    "tests/extend/test_recipes.py",
    "tests/tree/test_page_commands.py",
    "tests/tree/test_pages.py",
    "tests/tree/test_walkthroughs.py",
)
"""Tests that take minutes together: a browser, recipes in a copy of the tree, commands and figures of pages.

`make check` leaves them out, with the single tests that are marked `long`; `make long` and `make proof` run
all of them, `.ci/run` some. CONTRIBUTING.md says what protects what.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long-too PATHS` runs the long tests of some files beside all others."""
    parser.addoption("--long-too", default="", help="files and folders whose long tests run as well")


def pytest_configure(config: pytest.Config) -> None:
    """A long test that the command names runs without `-m long`."""
    if config.option.markexpr == "not long":
        if any(name.rstrip("/") in arg for arg in config.args for name in LONG):
            config.option.markexpr = ""
        elif config.option.long_too:
            config.option.markexpr = "not long or chosen"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test would run are not even imported."""
    name = collection_path.relative_to(ROOT).as_posix()
    without = config.option.markexpr.startswith("not long") and name.startswith(LONG)
    chosen = tuple(config.option.long_too.split())
    return True if without and name.endswith(".py") and not (chosen and name.startswith(chosen)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the long tests, and put the longest first: all processes would wait for it at the end."""
    chosen = tuple(config.option.long_too.split())
    for item in items:
        name = item.path.relative_to(ROOT).as_posix()
        if name.startswith(LONG):
            item.add_marker(pytest.mark.long)
        if chosen and name.startswith(chosen):
            item.add_marker(pytest.mark.chosen)
    items.sort(key=lambda item: item.path.name != "test_pages.py")


def pytest_collection_finish() -> None:
    """What was imported lives until the end: the collector of cycles need not walk through it again."""
    gc.set_threshold(100_000, 50, 50)  # as a command of ours has it
    gc.freeze()


@lru_cache(maxsize=2)
def _run(preset: str) -> Run:
    from moesim.simulator.predict.driver import predict
    from moesim.simulator.scenario import load_scenario

    prepared, (execution,), result = predict(load_scenario(preset))
    return prepared, execution, result


def computed_once(name: str, compute: Callable[[], T]) -> T:
    """Result of `compute`, which one process of this run of the tests computes and the others read."""
    path = Path(os.environ["MOESIM_CACHE"]) / f"{name}.pickle"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(compute()))
    result: T = pickle.loads(path.read_bytes())
    return result


INTERVALS = {"test_cli_plan.py": 2, "test_names.py": 2}
"""Ranked plans of a search whose intervals are computed in tests that print them. They take most of a small
search, so other tests compute none or ask for them; those of pages and of the dashboard see the program as
it is."""


@pytest.fixture(scope="module", autouse=True)
def few_intervals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Few intervals of ranked plans, or none, in this process."""
    stage = sys.modules.get("moesim.simulator.planner.engine_stage")
    with pytest.MonkeyPatch.context() as patch:
        if stage is not None and request.path.parts[-2] not in ("tree", "app", "e2e"):
            patch.setattr(stage, "MOST_COMPARED", INTERVALS.get(request.path.name, 0))
        yield


@pytest.fixture
def small_file(tmp_path: Path) -> str:
    """A small scenario that is fine, as `small.yaml` in the folder of a command."""
    shutil.copy(ROOT / "tests" / "golden" / "scenario-small.yaml", tmp_path / "small.yaml")
    return "small.yaml"


@pytest.fixture(scope="session")
def published_rows() -> list[Row]:
    """Every published figure of the home case beside its prediction."""
    from moesim.simulator.scoring.published import score

    return computed_once("published_rows", score)


@pytest.fixture(scope="session")
def full_checks() -> FullChecks:
    """Full resolution of the home case beside the folded run and measurements."""
    from moesim.simulator.scoring.published_full_resolution import check_full

    return computed_once("full_checks", check_full)


@pytest.fixture(scope="session")
def context_rows() -> list[ContextRow]:
    """GPU-hours of DeepSeek-V3's context extension under several plans."""
    from moesim.simulator.scoring.published import context_plans

    return computed_once("context_rows", context_plans)


@pytest.fixture(scope="session")
def home_case() -> Run:
    """Plan, execution and result of deepseek-v3-2048xh800 (about a second, once a session)."""
    return _run("deepseek-v3-2048xh800")


@pytest.fixture(scope="session")
def trace_pair() -> Run:
    """Plan, execution and result of deepseek-v3-trace-pair."""
    return _run("deepseek-v3-trace-pair")


@pytest.fixture(scope="session")
def compiled_code() -> None:
    """The compiled engine's code on disk: one worker compiles it, the others wait."""
    pytest.importorskip("numba")
    from moesim.simulator.engine.compiled import loader

    end = time.monotonic() + 300.0
    while loader.place()[0] is not None and not loader.warm() and time.monotonic() < end:
        time.sleep(0.2)


# -- a small job ------------------------------------------------------------------------------------

SMALL = [
    "cluster={node: hgx-h800, nodes: 8, network: mpft-ib-400g, name: 64xh800, price_per_gpu_hour: $2/h}",
    "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "stages.blocks=[embedding moe*2, moe*2, moe*2, moe*2 head]",
    "batch.sequences=128",
]


@pytest.fixture(scope="session")
def small() -> Scenario:
    """Eight MoE blocks of DeepSeek-V3 on 64 H800: DualPipe over 4 ranks, 16-way expert parallelism."""
    from moesim.simulator.scenario import load_scenario

    return load_scenario("deepseek-v3-2048xh800", SMALL)


@pytest.fixture(scope="module")
def effects_once() -> Iterator[None]:
    """Modules that draw intervals compute the effects of a scenario once; tests that ask get their own."""
    from moesim.simulator.studies.effects import entry_effects

    known: dict[tuple[str, int], Any] = {}

    def once(prepared: Prepared, executions: Sequence[Execution], exact: int = 0) -> Any:
        key = prepared.scenario.model_dump_json(), exact
        if key not in known:
            known[key] = entry_effects(prepared, executions, exact)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        for module in ("compare", "uncertainty", "whole_run"):
            patched.setattr(f"moesim.simulator.studies.{module}.entry_effects", once)
        yield


# -- toy programs: chosen durations for every phase -------------------------------------------------

COMPUTE: dict[BlockKind, tuple[Phase, ...]] = {
    "embedding": ("attn F", "attn W"),
    "dense": ("attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W"),
    "moe": ("attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W"),
    "mtp": ("attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W"),
    "head": ("mlp F", "mlp I", "mlp W"),
}

MODES: tuple[Mode, ...] = ("alone", "sms_reserved", "overlapped")
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
    sharding_ns: float = 0.0,
    scatters_wait: bool = False,
    link_map: LinkMap | None = None,
    group: int = 0,
    jitter_cv: float = 0.0,
) -> Program:
    """A program whose phases last what the functions say, in nanoseconds (True: in a pair).

    MoE blocks have transfers where `transfer_ns` is above 0; transfers and sends move `bytes_` each over
    links of `rate` bytes/s. `clock[rank][member]` are time factors, `loads[block][member]` relative rows.
    Collectives over replicas inside the step last `sharding_ns` each: those of ZeRO-3, or in a schedule with
    pairs gradient scatters alone, for which compute outside of pairs waits if `scatters_wait`. `link_map`
    replaces the folded one, for a group of several.
    """
    from moesim.simulator.cost.table import CostTable, PhaseCost, SyncCost, TransferCost
    from moesim.simulator.engine.compilation import compile_program
    from moesim.simulator.engine.link_map import FoldedLinkMap
    from moesim.simulator.engine.program import MemberVariation, PricedSchedule
    from moesim.simulator.schedules.template import EP_PHASES, OVERLAP_ORDERS

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
    every: list[Phase] = (
        ["scatter W"] if schedule.paired or scatters_wait else ["gather F", "gather B", "scatter W"]
    )
    sharded = every if sharding_ns > 0.0 else []
    gather = TransferCost(launch_ns / NS, sharding_ns / NS, 0.0, bytes_, 0.0)
    transfer |= {(kind, phase, mode): gather for kind in kinds for phase in sharded for mode in MODES}
    pp = schedule.pp
    factors = np.ones((pp, 1)) if clock is None else np.array(clock, dtype=np.float64)
    members = factors.shape[1]
    routed = sum(kind in ("moe", "mtp") for stage in blocks for kind in stage)
    rows = np.ones((routed, schedule.microbatches, members))
    for number, values in (loads or {}).items():
        rows[number] = np.array(values)[None, :]
    ends = tuple(sync or [SyncCost(0, 0, 0, 0)] * pp)
    costs = CostTable(compute, transfer, bytes_, send_ns / NS, ends, scatters_wait=scatters_wait)
    chosen = order or OVERLAP_ORDERS["deepseek-v3"]
    links = link_map or FoldedLinkMap(schedule.pp, rate, rate, costs.send_across_nodes)
    priced = PricedSchedule(schedule, tuple(tuple(stage) for stage in blocks), costs, chosen)
    return compile_program(priced, MemberVariation(factors, rows, rows, jitter_cv, 0), links, group)


@pytest.fixture(scope="session")
def toy() -> Callable[..., Program]:
    """See `build_toy`."""
    return build_toy


class Outcome(NamedTuple):
    """What one call of the command line did."""

    code: int
    out: str
    err: str


MIXED = {
    "name": "mixed",
    "model": "qwen3-30b-a3b",
    "fleet": {
        "pools": [
            {
                "cluster": {
                    "name": f"16x{kind}",
                    "node": f"hgx-{kind}",
                    "nodes": 2,
                    "network": "mrft-ib-400g",
                    "price_per_gpu_hour": price,
                }
            }
            for kind, price in (("h100", "$3/h"), ("a100", "$1.5/h"))
        ]
    },
    "profile": "generic-roofline",
    "precision": "bf16",
    "parallel": {"pp": 4, "ep": 8, "zero_stage": 1},
    "schedule": "1f1b",
    "batch": {"sequences": 128, "sequence_length": 4096},
    "software": {"framework": "none"},
    "recompute": "full",
    "routing": {"expert_load_cv": "10 %"},
    "variation": {"clock_cv": "1 %", "jitter_cv": "1 %"},
    "run": {"tokens": 1e12},
}


@pytest.fixture(scope="session")
def mixed() -> Scenario:
    """A small MoE model over four pipeline ranks, two on 16 H100 and two on 16 A100."""
    from moesim.hwmodels.validation import validate_model
    from moesim.simulator.scenario import Scenario

    return validate_model(Scenario, MIXED, "mixed")


@pytest.fixture
def mixed_file(tmp_path: Path) -> Path:
    """The same as a scenario file."""
    from moesim.hwmodels.yaml_io import dump_mapping

    path = tmp_path / "mixed.yaml"
    path.write_text(dump_mapping(MIXED))
    return path


@pytest.fixture
def run(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """The command line in an empty folder, in this process."""
    from moesim.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")  # a sentence on one line; tests/cli/test_console.py has the widths
    monkeypatch.setattr("moesim.cli.console.QUIET_S", 1e6)  # no progress, however busy the machine is

    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, *capsys.readouterr())

    return call


# -- max-min sharing by the book, in fractions: all flows and all links, solved again at every event -----

Bytes = dict[int, Fraction]
"""Link to bytes of one transfer."""


def filled(flows: Sequence[tuple[Bytes, Fraction | None]], capacity: Sequence[Fraction]) -> list[Fraction]:
    """Transfers per unit of time by progressive filling; a flow: (bytes by link, duration alone or None)."""
    largest = [max(demand.values()) for demand, _ in flows]
    level = [Fraction(0)] * len(flows)
    growing = set(range(len(flows)))

    def load(link: int, of: Sequence[Fraction]) -> Fraction:
        parts = (
            demand[link] / big * x
            for (demand, _), big, x in zip(flows, largest, of, strict=True)
            if link in demand
        )
        return sum(parts, Fraction(0))

    while growing:
        rising = [Fraction(i in growing) for i in range(len(flows))]
        steps = [
            (capacity[link] - load(link, level)) / load(link, rising)
            for link in range(len(capacity))
            if load(link, rising) > 0
        ]
        steps += [
            big / alone - level[i]
            for i, (big, (_, alone)) in enumerate(zip(largest, flows, strict=True))
            if i in growing and alone is not None
        ]
        step = min(steps)
        level = [x + step * up for x, up in zip(level, rising, strict=True)]
        full = {link for link in range(len(capacity)) if load(link, level) == capacity[link]}
        growing -= {
            i
            for i, (demand, alone) in enumerate(flows)
            if full & set(demand) or (alone is not None and level[i] == largest[i] / alone)
        }
    return [x / big for x, big in zip(level, largest, strict=True)]


def finished(
    arrivals: Sequence[tuple[Fraction, Bytes, Fraction | None]], capacity: Sequence[Fraction]
) -> list[Fraction]:
    """When each of the (start, bytes by link, duration alone) ends."""
    left = [Fraction(1)] * len(arrivals)
    ends = [Fraction(0)] * len(arrivals)
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    running: list[int] = []
    now = Fraction(0)
    while waiting or running:
        rates = filled([arrivals[i][1:] for i in running], capacity) if running else []
        done = [now + left[i] / rate for i, rate in zip(running, rates, strict=True)]
        start = arrivals[waiting[0]][0] if waiting else inf
        then = min([*done, start])
        assert isinstance(then, Fraction)
        for i, rate, end in zip(list(running), rates, done, strict=True):
            left[i] -= rate * (then - now)
            if end == then:
                running.remove(i)
                ends[i] = then
        now = then
        while waiting and arrivals[waiting[0]][0] == now:
            running.append(waiting.pop(0))
    return ends


class Textbook(NamedTuple):
    """The reference as one fixture."""

    rates: Callable[..., list[Fraction]]
    ends: Callable[..., list[Fraction]]


@pytest.fixture(scope="session")
def textbook() -> Textbook:
    """`rates` of flows, and `ends` of arrivals in time."""
    return Textbook(filled, finished)
