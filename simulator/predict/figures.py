"""The figures of a prediction that studies tabulate, by name (pure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from moesim.hwmodels.confidence import Confidence
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.engine.full_resolution.result import FaultEffect
from moesim.simulator.predict.result_parts import Breakdown, MemoryResult, RunResult, StepEnergy, StepResult
from moesim.simulator.predict.step import Prepared, run_step
from moesim.simulator.predict.work_size import Band, Uncertainty
from moesim.simulator.scenario.sections import Fault, NodeLoss

if TYPE_CHECKING:
    from moesim.simulator.run.report import RunReport
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.scenario.defaults import Default


class Figures(Protocol):
    """The fields of a result from which figures are read."""

    @property
    def step(self) -> StepResult:
        """Time and rates of a step."""

    @property
    def breakdown_s(self) -> Breakdown:
        """Seconds of the step of pipeline rank 0 by category."""

    @property
    def forward_backward_pair_s(self) -> float | None:
        """Mean duration of an overlapped pair."""

    @property
    def memory(self) -> MemoryResult:
        """Memory of the fullest GPU."""

    @property
    def run(self) -> RunResult:
        """The run that consists of such steps."""


Metric = Literal["step_time_s", "tokens_per_s", "mfu_causal", "days", "cost_usd"]

UNCERTAIN: dict[Metric, int] = {
    "step_time_s": 1,
    "tokens_per_s": -1,
    "mfu_causal": -1,
    "days": 1,
    "cost_usd": 1,
}
"""Figures with an interval, with the power of the step time to which each is proportional."""

FIGURE_READERS: dict[str, Callable[[Figures], float | bool | None]] = {
    "step_time_s": lambda r: r.step.time_s,
    "tokens_per_s": lambda r: r.step.tokens_per_s,
    "tokens_per_s_per_gpu": lambda r: r.step.tokens_per_s_per_gpu,
    "mfu_causal": lambda r: r.step.mfu_causal,
    "mfu_noncausal": lambda r: r.step.mfu_noncausal,
    "lower_bound_s": lambda r: r.step.lower_bound_s,
    "upper_bound_s": lambda r: r.step.upper_bound_s,
    "bubble_s": lambda r: r.breakdown_s.bubble,
    "exposed_communication_s": lambda r: r.breakdown_s.exposed_communication,
    "pair_s": lambda r: r.forward_backward_pair_s,
    "memory_bytes": lambda r: r.memory.total_bytes,
    "fits": lambda r: r.memory.fits,
    "at_risk": lambda r: r.memory.verdict == "at risk",
    "days": lambda r: r.run.days,
    "gpu_hours": lambda r: r.run.gpu_hours,
    "cost_usd": lambda r: r.run.cost_usd,
}
"""Columns of sweeps and comparisons, as functions of a result."""


def figures(result: Figures) -> dict[str, float | bool | None]:
    """Every tabulated figure of a result, by name."""
    return {name: read(result) for name, read in FIGURE_READERS.items()}


def energy_figures(energy: StepEnergy | None) -> dict[str, float | bool | None]:
    """Mean watts of a board and joules a token of all boards, for sweeps; empty where they are not known."""
    return {} if energy is None else {"board_w": energy.board_w, "joules_per_token": energy.joules_per_token}


PROPORTIONAL_TO: dict[str, Metric] = {
    "tokens_per_s_per_gpu": "tokens_per_s",
    "tokens_per_day": "tokens_per_s",
    "mfu_noncausal": "mfu_causal",
    "gpu_hours": "days",
}
"""Figures that are proportional to another one for every step time."""


POWERS: dict[str, int] = {
    **{str(name): power for name, power in UNCERTAIN.items()},
    **{name: UNCERTAIN[of] for name, of in PROPORTIONAL_TO.items()},
    "tokens_per_usd": -1,
    "usd_per_billion_tokens": 1,
    "gpu_hours_per_billion_tokens": 1,
}
"""Figures that depend on the step time, with the power of it to which each is proportional."""

NORMALISED: dict[str, Callable[[Figures], float | None]] = {
    "tokens_per_usd": lambda r: r.run.tokens / r.run.cost_usd if r.run.cost_usd else None,
    "usd_per_billion_tokens": lambda r: r.run.cost_usd / r.run.tokens * 1e9 if r.run.cost_usd else None,
    "gpu_hours_per_billion_tokens": lambda r: r.run.gpu_hours / r.run.tokens * 1e9,
}
"""Totals of a run, normalised to compare runs with different numbers of GPUs, prices or tokens."""


def powered_figures(result: Figures) -> dict[str, float | None]:
    """Every figure that is proportional to a power of the step time (`POWERS`), by name; None if unknown."""
    readers: dict[str, Callable[[Figures], float | bool | None]] = {
        **FIGURE_READERS,
        **NORMALISED,
        "tokens_per_day": lambda r: r.step.tokens_per_day,
    }
    values = {name: readers[name](result) for name in POWERS}
    return {name: value if isinstance(value, float) else None for name, value in values.items()}


def bands_of_figures(result: Figures, uncertainty: Uncertainty) -> dict[str, Band]:
    """Intervals by figure: those given, and of the figures that are proportional to one of them."""
    bands = dict(uncertainty.bands)
    predicted = {**figures(result), "tokens_per_day": result.step.tokens_per_day}
    for name, other in PROPORTIONAL_TO.items():
        band, value = bands.get(other), predicted[name]
        if band is not None and band.predicted and isinstance(value, float):
            scale = value / band.predicted
            bands[name] = Band(**{k: v * scale for k, v in band.model_dump().items()})
    return bands


# -- what figures stand on ---------------------------------------------------------------------------


class EvidentFigures(Figures, Protocol):
    """The fields of a result that say what its figures stand on."""

    @property
    def confidence(self) -> Confidence:
        """Level of the evidence behind the GEMM rates."""

    @property
    def extrapolated(self) -> tuple[str, ...]:
        """Inputs that were assumed or extrapolated."""

    @property
    def defaults(self) -> tuple[Default, ...]:
        """Values that rules chose."""


class FigureBasis(Struct, frozen=True):
    """What a figure stands on: the weakest level of evidence that decides it, and why in a few words.

    `measured`, `published` and `peak-only` are of the GEMM rates, where no single input below them decides;
    `assumed` where nobody stated an input that the figure is proportional to; `unknown` where one is missing.
    """

    level: Confidence | Literal["assumed", "unknown"]
    reason: str


def figure_bases(scenario: Scenario, result: EvidentFigures) -> dict[str, FigureBasis]:
    """What each headline figure of a result stands on, by the figure's name.

    A figure of the step stands on the rates and on every assumed input; days and cost also on the tokens of
    the run, and cost on its price.
    """
    chosen = {default.key: default for default in result.defaults}
    assumed = len(result.extrapolated) + sum(default.kind == "assumed" for default in result.defaults)
    step = FigureBasis(result.confidence, f"{assumed} inputs assumed" if assumed else "no input assumed")
    run, price = step, scenario.run.price
    if "run.tokens" in chosen:
        run = FigureBasis("assumed", "tokens of the run by rule")
    cost, stated = run, [machine.price_per_gpu_hour for machine in scenario.machines]
    if result.run.cost_usd is None:
        cost = FigureBasis("unknown", "no price is stated or known")
    elif price is None and any(offer is not None and offer.kind == "assumed" for offer in stated):
        cost = FigureBasis("assumed", "the price of a GPU-hour")
    elif price is None and any(key.endswith("price_per_gpu_hour") for key in chosen):
        cost = FigureBasis("assumed", "price by rule: the middle of known offers")
    names = ("step_time_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_noncausal", "tokens_per_day")
    return dict.fromkeys(names, step) | {"days": run, "gpu_hours": run, "cost_usd": cost}


def run_bases(
    scenario: Scenario, result: EvidentFigures, report: RunReport, by_rule: bool
) -> dict[str, FigureBasis]:
    """What the figures of a whole run stand on; `by_rule`: nobody stated its failures and checkpoints."""
    bases, failures = figure_bases(scenario, result), scenario.run.failures
    stops = FigureBasis("unknown", "the run states no failures")
    if failures is not None:
        stops = FigureBasis("assumed", f"failures from {failures.name}{' by rule' if by_rule else ''}")
    energy = FigureBasis("assumed", "every board at its power limit")
    if report.energy_kwh is None:
        energy = FigureBasis("unknown", "no energy site is named")
    days = bases["days"] if bases["days"].level == "assumed" or failures is None else stops
    cost = bases["cost_usd"] if report.cost_usd is not None else FigureBasis("unknown", "no price is known")
    own = dict.fromkeys(("goodput", "interruptions"), stops) | dict.fromkeys(("energy_kwh", "co2_kg"), energy)
    return own | {"days": days, "cost_usd": cost}


def uncertain_metric(name: str) -> Metric:
    """`name` if that figure has an interval; otherwise raises InputError listing those that have."""
    for metric in UNCERTAIN:
        if metric == name:
            return metric
    raise InputError(f"metric {name!r} is not one of {', '.join(UNCERTAIN)}{nearest(name, list(UNCERTAIN))}")


# -- fault effects -----------------------------------------------------------------------------------
# The cost of each fault, as the step with that fault alone against the step without faults.


def fault_effects(prepared: Prepared, together_s: float) -> tuple[FaultEffect, ...]:
    """Step times with each fault alone and with all of them (`together_s`), against the healthy cluster.

    The draws of speed, load and jitter are the same in all cases, so the faults alone cause the differences.
    """
    faults = prepared.scenario.faults
    if not faults:
        return ()
    without = _seconds(prepared, ())
    rows = [FaultEffect(cause="no fault", step_s=without, effect_s=0.0)]
    for fault in faults if len(faults) > 1 else ():
        try:
            alone = _seconds(prepared, (fault,))
        except InfeasibleError as error:
            rows.append(FaultEffect(cause=str(fault), step_s=None, effect_s=None, note=str(error)))
            continue
        rows.append(FaultEffect(cause=str(fault), step_s=alone, effect_s=alone - without))
    name = str(faults[0]) if len(faults) == 1 else "all of them"
    lost = any(isinstance(fault, NodeLoss) for fault in faults)
    note = "with fewer sequences a step: see lost_groups" if lost else ""
    rows.append(FaultEffect(cause=name, step_s=together_s, effect_s=together_s - without, note=note))
    return tuple(rows)


def _seconds(prepared: Prepared, faults: tuple[Fault, ...]) -> float:
    """Seconds of the same step with only these faults."""
    scenario = prepared.scenario.model_copy(update={"faults": faults})
    return run_step(prepared.job.with_scenario(scenario), engine=prepared.engine.name).time_s
