"""moesim: predicts how long a large MoE training run takes on a cluster and what it costs.

    >>> import moesim
    >>> result = moesim.simulate("deepseek-v3-2048xh800")
    >>> result.step.time_s

`simulate` takes a preset name, a scenario file or a `Scenario`; `load` reads a scenario and applies
overrides such as "parallel.ep=32"; `run` predicts the whole run with failures and bill; `score` compares
the home case with every published figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
    from moesim.simulator.planner.result import PlanResult
    from moesim.simulator.planner.search import plan
    from moesim.simulator.planner.space import PlanSpace
    from moesim.simulator.result import Result
    from moesim.simulator.run.report import RunReport
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.validation import score

__all__ = [
    "InfeasibleError",
    "InputError",
    "MoesimError",
    "PlanResult",
    "PlanSpace",
    "Result",
    "RunReport",
    "Scenario",
    "__version__",
    "load",
    "plan",
    "run",
    "score",
    "simulate",
]


def load(name_or_path: str, *overrides: str) -> Scenario:
    """A scenario by preset name or file path, with `key=value` overrides.

    Raises InputError with file, key, value and nearest legal value for anything malformed.
    """
    from moesim.simulator.scenario import load_scenario

    return load_scenario(name_or_path, overrides)


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
