"""moesim: predicts how long a large MoE training run takes on a cluster and what it costs.

    >>> import moesim
    >>> result = moesim.simulate("deepseek-v3-2048xh800")
    >>> result.step.time_s

`simulate` takes a preset name, a scenario file or a `Scenario`; `load` reads a scenario and applies
overrides such as "parallel.ep=32"; `run` predicts the whole run with failures and bill; `score` compares
the home case with every published figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
    from moesim.simulator.check import Check
    from moesim.simulator.neighbours import Neighbour
    from moesim.simulator.planner.result import PlanResult
    from moesim.simulator.planner.search import plan
    from moesim.simulator.planner.space import PlanSpace
    from moesim.simulator.result import Result
    from moesim.simulator.run.report import RunReport
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.timeline import Timeline
    from moesim.simulator.validation import Row, score

__all__ = [
    "Check",
    "InfeasibleError",
    "InputError",
    "MoesimError",
    "PlanResult",
    "PlanSpace",
    "Result",
    "RunReport",
    "Scenario",
    "Timeline",
    "__version__",
    "check",
    "differences",
    "load",
    "neighbours",
    "plan",
    "presets",
    "published",
    "reprice",
    "run",
    "score",
    "simulate",
    "timeline",
]


def load(name_or_path: str, *overrides: str) -> Scenario:
    """A scenario by preset name or file path, with `key=value` overrides.

    Raises InputError with file, key, value and nearest legal value for anything malformed.
    """
    from moesim.simulator.scenario import load_scenario

    return load_scenario(name_or_path, overrides)


def presets() -> list[str]:
    """Names of the scenarios that ship with the package."""
    from moesim.simulator.scenario import preset_names

    return preset_names()


def check(scenario: Scenario | str, *overrides: str) -> Check:
    """Whether a scenario is legal and fits into memory, without running it; arguments as of `simulate`.

    Raises InputError for an illegal scenario.
    """
    from moesim.simulator.check import check as run

    return run(load(scenario, *overrides) if isinstance(scenario, str) else scenario)


def timeline(scenario: Scenario | str, *overrides: str, rank: int = 0) -> Timeline:
    """When what ran: actions of every pipeline rank, and an action of `rank` phase by phase.

    Arguments and errors as of `simulate`.
    """
    from moesim.simulator.timeline import timeline as run

    return run(load(scenario, *overrides) if isinstance(scenario, str) else scenario, rank)


def differences(first: Result, other: Result) -> list[tuple[str, float]]:
    """Seconds by cause that the step of `other` takes longer than that of `first`; they add up exactly."""
    from moesim.simulator.differences import differences as run

    return run(first, other)


def neighbours(
    scenario: Scenario, result: Result, progress: Callable[[float, str], None] = lambda share, text: None
) -> tuple[Neighbour, ...]:
    """What to try next: legal single changes of a scenario, simulated, the fastest that fits first.

    `result` is the scenario's own; `progress` is called with the share that is done and what comes next.
    """
    from moesim.simulator.neighbours import neighbours as run

    return run(scenario, result, progress)


def published(scenario: Scenario, result: Result) -> list[Row]:
    """What was published about this very job beside its prediction; empty for any other job."""
    from moesim.simulator.validation import beside_published

    return beside_published(scenario, result)


def reprice(result: Result, scenario: Scenario) -> Result:
    """A finished prediction under the prices of `scenario`, which must differ in nothing else.

    Raises InputError where a price choice fits no offer.
    """
    from moesim.simulator.reprice import repriced

    return repriced(result, scenario)


def simulate(scenario: Scenario | str, *overrides: str) -> Result:
    """Predict one training step and the run made of it.

    `scenario`: a `Scenario`, a preset name or a file path; overrides apply to the latter two. Raises
    InputError for an illegal scenario.
    """
    from moesim.simulator.simulate import simulate as run

    return run(load(scenario, *overrides) if isinstance(scenario, str) else scenario)


def run(scenario: Scenario | str, *overrides: str, step_time_s: float | None = None) -> RunReport:
    """Predict the whole run: phases, failures and restarts, finish date, cost, energy.

    `step_time_s`: of the scenario's own step (s) where it is known already; simulated otherwise. Raises
    InputError for an illegal scenario, InfeasibleError for a run that practically never ends.
    """
    from moesim.simulator.simulate import predict_run

    return predict_run(load(scenario, *overrides) if isinstance(scenario, str) else scenario, step_time_s)


def __getattr__(name: str) -> object:
    """Public names that need imports are loaded when first used, so that `import moesim` stays fast."""
    if name in ("InputError", "InfeasibleError", "MoesimError"):
        from moesim.hwmodels import errors

        return getattr(errors, name)
    if name == "Check":
        from moesim.simulator.check import Check

        return Check
    if name == "Timeline":
        from moesim.simulator.timeline import Timeline

        return Timeline
    if name == "Scenario":
        from moesim.simulator.scenario import Scenario

        return Scenario
    if name == "Result":
        from moesim.simulator.result import Result

        return Result
    if name == "RunReport":
        from moesim.simulator.run.report import RunReport

        return RunReport
    if name == "plan":
        from moesim.simulator.planner.search import plan

        return plan
    if name == "PlanSpace":
        from moesim.simulator.planner.space import PlanSpace

        return PlanSpace
    if name == "PlanResult":
        from moesim.simulator.planner.result import PlanResult

        return PlanResult
    if name == "score":
        from moesim.simulator.validation import score

        return score
    raise AttributeError(f"module 'moesim' has no attribute {name!r}")
