"""Public reports as scenarios beside what their authors measured: speed, memory, whether it fitted.

A table (columns `CaseRow`) stands in a folder with one scenario file a case; `validate --rows` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest, validate_model
from moesim.simulator.memory.gpu import FRAMEWORK_BYTES
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scoring import file_records

COLUMNS = frozenset({"scenario", "metric", "value", "scored"})
"""Columns that tell this table from others."""
NEAR = 0.25
"""A speed is near where prediction and report differ by at most this share of the report."""
GIB = 2.0**30


def _allocated(result: Result) -> float:
    memory = result.memory
    active = memory.active_bytes
    return (memory.total_bytes - FRAMEWORK_BYTES.value if active is None else active) / GIB


SPEEDS: dict[str, Callable[[Result], float]] = {
    "step_time": lambda r: r.step.time_s,
    "tokens_per_s_per_gpu": lambda r: r.step.tokens_per_s_per_gpu,
    "mfu_noncausal": lambda r: 100.0 * r.step.mfu_noncausal,
    "flops_per_gpu": lambda r: r.step.tflops_per_gpu_noncausal,
}
"""Metrics of speed in the table's units (s, tokens/s, %, TFLOP/s)."""
RATIO, MEMORY, VERDICT = "ratio_to_nccl", "memory_allocated", "verdict"
METRICS = (*SPEEDS, RATIO, MEMORY, VERDICT)


class CaseRow(Frozen):
    """One reported figure; `framework` is the trainer release that the scenario runs on."""

    scenario: str
    source: str
    framework: str
    metric: str
    value: str
    unit: str = ""
    scored: Literal["yes", "no"]
    remark: str = ""


class ScoredCase(Frozen):
    """A reported figure beside the predicted one; `right` is None where it was refused or is not scored.

    `own_rates` says, in words, where the profile's rates come from the run itself.
    """

    scenario: str
    metric: str
    reported: str
    predicted: str = ""
    relative_error: float | None = None
    right: bool | None = None
    refused: str = ""
    own_rates: str = ""


def own_rates(scenario: Scenario) -> str:
    """A note where a profile's rates come from a trace of this scenario's run, or of a run not named."""
    for profile in scenario.calibrations:
        if (of := profile.trace) is None or of.scenario not in ("", scenario.name):
            continue
        is_own = "which is scored here" if of.scenario else "and does not say of which scenario"
        return (
            f"the profile {profile.name} has its rates from the trace {of.files[0].name}, {is_own}: "
            "agreement with that run says nothing about the prediction; score it on another run"
        )
    return ""


def score_cases(file: Path) -> list[ScoredCase]:
    """Score every row of a table, in its order. Raises InputError for a malformed row."""
    rows = [
        validate_model(CaseRow, record, f"{file.name}:{n}") for n, record in enumerate(file_records(file), 2)
    ]

    @cache
    def predicted(name: str, framework: str, *overrides: str) -> tuple[Result, str]:
        path = str(file.parent / f"{name}.yaml")
        scenario = load_scenario(path, [f"software.framework={framework}", *overrides])
        return simulate(scenario), own_rates(scenario)

    known = frozenset(path.stem for path in file.parent.glob("*.yaml"))
    return [_scored(row, predicted, known) for row in rows]


def _scored(row: CaseRow, predicted: Callable[..., tuple[Result, str]], known: frozenset[str]) -> ScoredCase:
    """Score a row; a ratio is to the case `...-nccl` beside it, or without one to the same plan on NCCL."""
    case = {"scenario": row.scenario, "metric": row.metric, "reported": f"{row.value} {row.unit}".strip()}
    if row.scored == "no":
        return ScoredCase(**case, refused=f"not scored: {row.remark or 'the table says so'}")
    if row.metric not in METRICS:
        return ScoredCase(
            **case, refused=f"metric {row.metric!r} is not known{nearest(row.metric, list(METRICS))}"
        )
    try:
        result, case["own_rates"] = predicted(row.scenario, row.framework)
        if row.metric == VERDICT:
            verdict = result.memory.verdict
            return ScoredCase(**case, predicted=verdict, right=verdict == row.value)
        if row.metric == RATIO:
            other = f"{row.scenario.rpartition('-')[0]}-nccl"
            stated = other in known
            name, change = (other, ()) if stated else (row.scenario, ("communication.kernels=nccl",))
            plain, _ = predicted(name, row.framework, *change)
            value = plain.step.time_s / result.step.time_s
        else:
            value = SPEEDS.get(row.metric, _allocated)(result)
        error = value / float(row.value) - 1.0
    except (InputError, InfeasibleError, ValueError) as error_:
        return ScoredCase(**case, refused=str(error_))
    return ScoredCase(
        **case, predicted=f"{value:.4g} {row.unit}".strip(), relative_error=error, right=abs(error) <= NEAR
    )
