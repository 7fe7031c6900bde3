"""moesim: predicts how long a large MoE training run takes on a cluster and what it costs.

    >>> import moesim
    >>> home = moesim.load("deepseek-v3-2048xh800")
    >>> result = moesim.simulate(home, uncertainty=True)
    >>> result.step.time_s, result.uncertainty.bands["step_time_s"]
    >>> moesim.compare([home, home.replace(communication={"sms": 8})]).to_pandas()
    >>> moesim.sweep(home, {"communication.sms": "4..32:4"}, store="sms.sqlite").to_pandas()

Every function takes a scenario first: a `Scenario`, a preset's name, a path, or a result, which carries what
it is of in `inputs`; then overrides such as "parallel.ep=32", which are applied or refused. `load` gives the
`Scenario`. `simulate` predicts a step, `estimate` in closed form; `explain`, `compare`, `sweep`, `interval`
and `sensitivity` study it. `plan` searches plans, `compare_hardware` on several clusters, `size` with the
number of GPUs unknown; `run` predicts the whole run, `serve` serves requests with the model, and `score`
compares the home case with every published figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.version import __version__

if TYPE_CHECKING:
    from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
    from moesim.simulator.planner.estimate import Estimate
    from moesim.simulator.planner.hardware import HardwareComparison, compare_hardware
    from moesim.simulator.planner.result import PlanResult
    from moesim.simulator.planner.search import plan
    from moesim.simulator.planner.sized import Sizing
    from moesim.simulator.planner.sizing import size
    from moesim.simulator.planner.space import PlanSpace
    from moesim.simulator.predict.driver import Check
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.timeline import Timeline
    from moesim.simulator.predict.work_size import Uncertainty
    from moesim.simulator.run.report import RunReport
    from moesim.simulator.scenario import AnyScenario, Scenario
    from moesim.simulator.scenario.inputs import Inputs
    from moesim.simulator.scoring.published import Row, score
    from moesim.simulator.serving.results import ServingResult
    from moesim.simulator.serving.simulate import ServingSweep, serve_sweep
    from moesim.simulator.serving.sized import ServingPlan
    from moesim.simulator.serving.sizing import serve_plan
    from moesim.simulator.studies.compare import Comparison, Neighbour
    from moesim.simulator.studies.explain import Explanation
    from moesim.simulator.studies.sweep import Progress, Sweep, sweep
    from moesim.simulator.studies.uncertainty import Sensitivity
    from moesim.simulator.trace import StepTrace
    from moesim.simulator.trace.compare import TraceComparison
    from moesim.simulator.trainers.meaning.understand import Understanding
    from moesim.simulator.trainers.trainer import Trainer

__all__ = [
    "Check",
    "Comparison",
    "Estimate",
    "Explanation",
    "HardwareComparison",
    "InfeasibleError",
    "InputError",
    "Inputs",
    "MoesimError",
    "PlanResult",
    "PlanSpace",
    "Progress",
    "Result",
    "RunReport",
    "Scenario",
    "Sensitivity",
    "ServingPlan",
    "ServingResult",
    "ServingSweep",
    "Sizing",
    "Sweep",
    "Timeline",
    "Trainer",
    "Uncertainty",
    "Understanding",
    "__version__",
    "check",
    "compare",
    "compare_hardware",
    "compare_trace",
    "estimate",
    "explain",
    "export_trace",
    "import_launch",
    "interval",
    "load",
    "neighbours",
    "plan",
    "presets",
    "published",
    "reprice",
    "run",
    "score",
    "sensitivity",
    "serve",
    "serve_plan",
    "serve_sweep",
    "simulate",
    "size",
    "sweep",
    "timeline",
    "trace",
    "trainer",
]

_LAZY = {
    "hwmodels.errors": "InfeasibleError InputError MoesimError",
    "simulator.planner.estimate": "Estimate",
    "simulator.planner.hardware": "HardwareComparison compare_hardware",
    "simulator.planner.result": "PlanResult",
    "simulator.planner.search": "plan",
    "simulator.planner.sized": "Sizing",
    "simulator.planner.sizing": "size",
    "simulator.planner.space": "PlanSpace",
    "simulator.predict.driver": "Check",
    "simulator.predict.result": "Result",
    "simulator.predict.timeline": "Timeline",
    "simulator.predict.work_size": "Uncertainty",
    "simulator.run.report": "RunReport",
    "simulator.scenario.inputs": "Inputs",
    "simulator.scenario.scenario": "Scenario",
    "simulator.scoring.published": "score",
    "simulator.serving.results": "ServingResult",
    "simulator.serving.sized": "ServingPlan",
    "simulator.serving.sizing": "serve_plan",
    "simulator.serving.simulate": "ServingSweep serve_sweep",
    "simulator.studies.compare": "Comparison",
    "simulator.studies.explain": "Explanation",
    "simulator.studies.sweep": "Progress Sweep sweep",
    "simulator.studies.uncertainty": "Sensitivity",
    "simulator.trainers.meaning.understand": "Understanding",
    "simulator.trainers.trainer": "Trainer",
}
"""Public names by module; they are loaded when first used, so that `import moesim` stays fast."""


def load(scenario: AnyScenario, *overrides: str) -> Scenario:
    """The scenario that a preset name, a path, its keys as a mapping, or a result stands for, with overrides.

    An override is a text `key=value`. Every function below takes its scenario and overrides in this way; it
    applies overrides to a `Scenario` too. Rules choose anew what nobody states, also on another accelerator.
    Raises InputError, with file, key, value and nearest legal value, for malformed input.
    """
    from moesim.simulator.scenario import load_scenario

    return load_scenario(scenario, overrides)


def import_launch(
    path: str | Path,
    base: AnyScenario = "deepseek-v3-2048xh800",
    *overrides: str,
    environment: Mapping[str, str] | None = None,
    run: int | None = None,
    parameters: Sequence[str] = (),
    vocab: int | None = None,
    gpus: int | None = None,
    ignore: Sequence[str] = (),
    ignore_unknown: bool = False,
) -> Understanding:
    """Read what a trainer was told (a log, a configuration, a script, a capture); say what it means.

    Nothing of the file is run. `base`, with the overrides, gives cluster, profile, prices and run, and needs
    no `parallel`; `environment` and `parameters` are what a shell would give the script; `run` chooses one of
    several; `vocab` is used where only a tokenizer is named; `gpus` replaces its number; `ignore` skips
    arguments, and `ignore_unknown` all that nobody knows.
    The result has a `scenario`. Raises InputError, with file and line, for what it refuses.
    """
    from moesim.simulator.trainers.meaning.understand import load_base, understand
    from moesim.simulator.trainers.reading import read_launch

    launch = read_launch(Path(path), environment or {}, parameters, run)
    return understand(
        launch, load_base(base, overrides), Path(path).name, vocab, gpus, ignore, ignore_unknown
    )


def compare_trace(
    path: str | Path,
    what: AnyScenario | str | Path,
    *overrides: str,
    rank: int | None = None,
    step: int | None = None,
    rules: str | Path | None = None,
) -> TraceComparison:
    """Set a traced step beside the prediction of a scenario, or beside another trace.

    Raises InputError for what is no trace of GPU work, an illegal scenario, and a rank or step not there.
    """
    from moesim.simulator.trace.compare import compared

    return compared(path, what, overrides, rank=rank, step=step, rules=rules)


def export_trace(
    scenario: AnyScenario,
    *overrides: str,
    to: str | Path,
    form: str = "kineto",
    ranks: Sequence[int] | None = None,
) -> list[Path]:
    """Write a predicted step for other tools and return the paths, a file a GPU.

    `form`: "kineto" (HTA, TraceLens, Perfetto) or "chakra" (execution traces). `to`: a folder, which is made,
    or a file for one GPU. `ranks`: GPUs, by default the first of every pipeline rank. Raises InputError for
    an illegal scenario, a fleet, another form, a GPU that is not there, and files that cannot be written.
    """
    from moesim.simulator.predict.step import run_step
    from moesim.simulator.trace.export import check_target, export_step

    check_target(Path(to), form)
    return export_step(run_step(load(scenario, *overrides)), to, form, ranks)


def trace(path: str | Path, rules: str | Path | None = None) -> StepTrace:
    """Read a profiler's trace of a step, or a folder with one file a rank; `rules` name kernels first.

    Raises InputError for what is no trace of GPU work.
    """
    from moesim.simulator.trace import read

    return read(path, rules)


def trainer(name: str) -> Trainer:
    """A training framework by name, such as "megatron", or by name and version, such as "megatron@0.14".

    Its `problems_of(scenario)` says why it cannot run a plan, and `arguments(scenario)` writes the plan for
    it. Raises InputError with the known names.
    """
    from moesim.simulator.trainers.registry import trainer_of

    return trainer_of(name)


def presets(*, serving: bool = False) -> list[str]:
    """Names of the scenarios that ship with the package: those of training, or those for `serve`."""
    from moesim.simulator.scenario import preset_names

    return preset_names(serving=serving)


def check(scenario: AnyScenario, *overrides: str) -> Check:
    """Check whether a scenario is legal and fits into memory, without simulating it.

    Raises InputError for an illegal scenario.
    """
    from moesim.simulator.predict.driver import check as run

    return run(load(scenario, *overrides))


def timeline(scenario: AnyScenario, *overrides: str, rank: int = 0, action: int | None = None) -> Timeline:
    """The actions and critical path of a step, and action number `action` of `rank` phase by phase."""
    from moesim.simulator.predict.timeline import timeline as run

    return run(load(scenario, *overrides), rank, action)


def neighbours(
    scenario: AnyScenario,
    result: Result,
    *overrides: str,
    progress: Callable[[float, str], None] = lambda share, text: None,
) -> tuple[Neighbour, ...]:
    """Simulate all legal single changes of a scenario; those that fit come first, fastest first.

    `result` is the scenario's own, overrides included; raises InputError for one of another scenario.
    `progress` is called with the share that is done and the next change.
    """
    from moesim.simulator.studies.compare import neighbours as run
    from moesim.simulator.studies.reprice import check_same

    chosen = load(scenario, *overrides)
    check_same(result, chosen, "neighbours")
    return run(chosen, result, progress)


def published(scenario: AnyScenario, result: Result, *overrides: str) -> list[Row]:
    """The published figures of a scenario's job with the predicted ones; empty if there are none.

    `result` is the scenario's own, overrides included; raises InputError for one of another scenario.
    """
    from moesim.simulator.scoring.published import beside_published
    from moesim.simulator.studies.reprice import check_same

    chosen = load(scenario, *overrides)
    check_same(result, chosen, "published")
    return beside_published(chosen, result)


def reprice(result: Result, scenario: AnyScenario, *overrides: str) -> Result:
    """A finished prediction with the prices of `scenario`, which must not differ in anything else.

    Raises InputError, with the keys, where it does, and where a price choice fits no offer.
    """
    from moesim.simulator.studies.reprice import reprice as run

    return run(result, load(scenario, *overrides))


def simulate(
    scenario: AnyScenario,
    *overrides: str,
    uncertainty: bool = False,
    engine_draws: int = 0,
    engine: str | None = None,
    scheduler: str | None = None,
) -> Result:
    """Predict one training step and the run made of it.

    `scenario` and overrides: as for `load`. `uncertainty`: the result carries P10, P50 and P90;
    `engine_draws`: also those of so many engine runs (20 to 10,000). `engine`: auto, simpy or compiled, all
    with the same result; None takes that of MOESIM_ENGINE, else auto. `scheduler`: address of a Dask cluster
    for the engine draws. Raises InputError for an illegal scenario, an unknown engine, draws out of range and
    a cluster without draws.
    """
    chosen = load(scenario, *overrides)
    if uncertainty or engine_draws or scheduler:
        from moesim.simulator.studies.uncertainty import with_uncertainty

        return with_uncertainty(chosen, engine_draws=engine_draws, scheduler=scheduler, engine=engine)
    from moesim.simulator.predict.driver import predict

    return predict(chosen, engine=engine).result


def estimate(scenario: AnyScenario, *overrides: str) -> Estimate:
    """Estimate one training step in closed form, without running the engine.

    The estimate has step time, lower bound, memory and cost, and states the error of the closed form; it has
    no breakdown, trace or interval. Raises InputError for an illegal scenario, and for what the closed form
    cannot price: a fleet, full resolution, faults, a schedule from a file and a part of the model.
    """
    from moesim.simulator.planner.estimate import estimate as run

    return run(load(scenario, *overrides))


def explain(what: AnyScenario, *overrides: str, counterfactuals: bool = True) -> Explanation:
    """Explain where the step time of a scenario, or of a finished prediction, goes and why.

    For a scenario, `counterfactuals` adds what each cause costs, by one short engine run without that cause;
    a finished prediction does not hold the programs for such runs. A prediction with overrides is made anew.
    Raises InputError for an illegal scenario.
    """
    from moesim.simulator.predict.result import Result as Finished
    from moesim.simulator.studies.explain import explain as run

    if isinstance(what, Finished) and not overrides:
        return run(what)
    from moesim.simulator.predict.driver import predict
    from moesim.simulator.studies.explain import counterfactuals as runs

    prepared, _, result = predict(load(what, *overrides))
    return run(result, runs(prepared, result.step.time_s) if counterfactuals else None)


def compare(
    scenarios: Sequence[AnyScenario],
    *overrides: str,
    names: Sequence[str | None] | None = None,
    uncertainty: bool = False,
) -> Comparison:
    """Compare two to four scenarios, and split the differences of their step times exactly by cause.

    Overrides apply to each of them. `names`: their names in the result; None stands for the scenario's own,
    to which the keys that differ are added where two scenarios have the same name. `uncertainty`: add bands
    of the differences. Raises InputError for an illegal scenario and for another number of scenarios.
    """
    from moesim.hwmodels.errors import InputError
    from moesim.simulator.studies.compare import compare as run

    if not isinstance(scenarios, list | tuple):
        raise InputError(f"compare takes a list of two to four scenarios, not {type(scenarios).__name__}")
    return run([load(s, *overrides) for s in scenarios], names=names, uncertainty=uncertainty)


def sensitivity(
    scenario: AnyScenario,
    *overrides: str,
    ranges: Mapping[str, tuple[object, object]] | None = None,
    seeds: int = 0,
    exact: int = 0,
    engine_draws: int = 0,
    scheduler: str | None = None,
) -> Sensitivity:
    """The step time with every uncertain input alone at its low and high end.

    `ranges`: lowest and highest value of scenario keys that are uncertain beside the calibration entries.
    `seeds`: number of further seeds to simulate. `exact`: number of entries to simulate instead of estimating
    their effect. `engine_draws`: number of engine runs with all of them off together (20 to 10,000), on the
    Dask cluster at the address `scheduler` if it is given. Raises InputError for illegal values of a key,
    draws out of range and a cluster without draws.
    """
    from moesim.simulator.studies.uncertainty import sensitivity as run

    return run(
        load(scenario, *overrides),
        ranges,
        seeds=seeds,
        exact=exact,
        engine_draws=engine_draws,
        scheduler=scheduler,
    )


def interval(
    scenario: AnyScenario,
    *overrides: str,
    metric: str = "step_time_s",
    level: float = 0.8,
    left_out: float | None = None,
    engine_draws: int = 0,
    scheduler: str | None = None,
) -> tuple[float, float, float]:
    """The interval that holds a figure with probability `level`, and its median, as (low, mid, high).

    `metric`: step_time_s, tokens_per_s, mfu_causal, days or cost_usd. `left_out`: standard deviation of the
    relative error that no calibration entry carries (None: the default of docs/model.md, section 16; 0: the
    entries alone). `engine_draws`: number of engine runs (20 to 10,000) from which the interval is taken
    instead of the first-order response, on the Dask cluster at the address `scheduler` if it is given. Raises
    InputError for another metric, draws out of range and a cluster without draws.
    """
    from moesim.simulator.studies.sources import MODEL_ERROR
    from moesim.simulator.studies.uncertainty import interval as run

    rest = MODEL_ERROR if left_out is None else left_out
    chosen = load(scenario, *overrides)
    return run(chosen, metric, level, left_out=rest, engine_draws=engine_draws, scheduler=scheduler)


def run(
    scenario: AnyScenario,
    *overrides: str,
    step_time_s: float | None = None,
    uncertainty: bool | None = None,
) -> RunReport:
    """Predict the whole run: phases, failures and restarts, finish date, cost, energy.

    Percentiles contain stops and the uncertainty of the step time (docs/model.md, sections 13 and 16); with
    `uncertainty=False` they contain only stops. A known `step_time_s` (s) is used instead of a simulation;
    percentiles then contain only stops unless `uncertainty=True`. Raises InputError for an illegal scenario,
    InfeasibleError for a run that practically never ends.
    """
    from moesim.simulator.studies.whole_run import predict_run

    return predict_run(load(scenario, *overrides), step_time_s, uncertainty)


def serve(scenario: AnyScenario, *overrides: str, intervals: bool = True) -> ServingResult:
    """Serve the load of a scenario on the replicas of its section `serving`, request by request.

    The result has latencies, rates, goodput, cost and energy; with `intervals`, for which the load is served
    twice more, their 80 % intervals too. Raises InputError for what cannot be served as stated,
    InfeasibleError where weights or requests do not fit.
    """
    from moesim.simulator.serving.simulate import serve as run

    return run(load(scenario, *overrides), with_intervals=intervals)


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    for module, names in _LAZY.items():
        if name in names.split():
            return getattr(import_module(f"moesim.{module}"), name)
    raise AttributeError(f"module 'moesim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Every public name, also those that are not loaded yet, so that completion offers them."""
    return sorted({*globals(), *__all__})
