"""Estimates the step of one plan in closed form, without running the engine (docs/model.md, eq. P2)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesim.hwmodels.calibration import profile_hash
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.summary_text import gib, percent, short, titled
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.cost.evidence import combined
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.layout.dispatch_limits import check_dispatcher
from moesim.simulator.layout.job import ResolvedJob, resolve
from moesim.simulator.layout.parallel import check_against_model, microbatches
from moesim.simulator.layout.stages import StageAssignment, describe
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.closed_form import CLOSED_FORM_ERROR, CostedPlan, step_seconds
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.replay import pattern
from moesim.simulator.predict.placement import assign_stages, fullest_of, memory_of
from moesim.simulator.predict.plan_checks import check_combination, check_hardware, check_ranges
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.inputs import CLOSED_FORM, Inputs, inputs_of
from moesim.simulator.scenario.machine import check_sms
from moesim.version import __version__

SCHEMA_VERSION = 1


class Estimate(TableResult):
    """A step in closed form; everything that only the engine knows (order, contention, traces) is absent."""

    scenario: str
    """Name of the scenario."""
    inputs: Inputs
    """What the estimate is of: scenario, overrides, plan and version."""
    method: Literal["closed form"] = "closed form"
    """Says that no engine ran; `moesim.simulate` gives the simulated step."""
    step_time_s: float
    """Step time by the longest path of the schedule."""
    error: float
    """Relative error against the simulated step that 95 of 100 closed forms keep."""
    lower_bound_s: float
    """Least time of the step on the busiest rank at these prices (docs/model.md, eq. P1)."""
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    memory: MemoryResult
    """Memory of the fullest GPU, counted as for a simulated step."""
    days: float
    """Days of the main phase of the run, without interruptions."""
    gpu_hours: float
    cost_usd: float | None
    """Rent of the GPUs for these hours; None where the cluster has no price."""
    stages: tuple[str, ...]
    """Blocks of every pipeline stage, in words."""
    profile: str
    profile_hash: str
    extrapolated: tuple[str, ...]
    """Prices that were assumed, or read outside the range of their source."""
    seed: int
    version: str
    defaults: tuple[Default, ...] = Field((), exclude_if=lambda value: not value)
    """Keys that the scenario omits, with their values and reasons; left out where it states all keys."""
    schema_version: int = SCHEMA_VERSION

    def __str__(self) -> str:
        """The figures with their units and the error of the closed form, in about ten lines."""
        memory, cost = self.memory, self.cost_usd
        return titled(
            "\n".join(
                [
                    f"{self.scenario}: ESTIMATE in closed form, not simulated (profile {self.profile})",
                    *self.inputs.lines(),
                ]
            ),
            {
                "step time": f"{self.step_time_s:.3f} s, within {percent(self.error)} of the simulated step "
                "for 95 of 100 plans",
                "lower bound": f"{self.lower_bound_s:.3f} s on the busiest rank at these prices",
                "throughput": f"{short(self.tokens_per_s)} tokens/s, {self.tokens_per_s_per_gpu:,.0f} "
                "tokens/s/GPU",
                "memory": f"{gib(memory.total_bytes)} of {gib(memory.capacity_bytes)} GiB on the fullest "
                f"GPU: {memory.verdict}",
                "run": f"{self.days:.1f} days without interruptions, {short(self.gpu_hours)} GPU-hours, "
                + ("no price known" if cost is None else f"${short(cost)}"),
                "evidence": f"{len(self.extrapolated)} prices assumed or extrapolated",
                "more": "moesim.simulate gives the simulated step with its breakdown and critical path",
            },
        )

    def rows(self) -> list[Row]:
        """One row with the figures."""
        fields = ("scenario", "method", "step_time_s", "error", "lower_bound_s", "tokens_per_s",
                  "tokens_per_s_per_gpu", "days", "gpu_hours", "cost_usd")  # fmt: skip
        memory: Row = {
            "memory_bytes": self.memory.total_bytes,
            "fits": self.memory.fits,
            "at_risk": self.memory.verdict == "at risk",
        }
        return [{name: getattr(self, name) for name in fields} | memory]


def estimate(scenario: Scenario) -> Estimate:
    """Estimate the step of a scenario's own plan in closed form, in a fraction of a simulation's time.

    Raises InputError for an illegal scenario, and for what the closed form cannot price: a fleet, full
    resolution, faults, a schedule from a file and a part of the model.
    """
    # What the closed form cannot price, with the remedy.
    beyond = {
        "a fleet of several clusters": scenario.fleet is not None,
        "resolution full": scenario.resolution == "full",
        "faults": bool(scenario.faults),
        "a schedule from a file": scenario.schedule.lower().endswith(".csv"),
        "a part of the model (stages.blocks)": scenario.stages.blocks is not None,
    }
    refused = [what for what, is_given in beyond.items() if is_given]
    if refused:
        raise InputError(
            f"scenario {scenario.name}: the closed form cannot price {' and '.join(refused)}; simulate the "
            "step instead (moesim simulate without --fast, moesim.simulate)"
        )
    job = resolve(scenario)
    frame, stages, costs = _laid_out(job)
    plan, policy, sms = scenario.parallel, scenario.recompute, scenario.communication.sms
    placement = scenario.routing.eplb
    loads = ExpertLoads(scenario, job.shape)
    choice = scenario.recipe, policy, sms
    costed = CostedPlan.of(costs, frame, plan, choice, loads.spread(frame, placement), stages)
    order = scenario.communication.order_of(scenario.schedule)
    seconds = float(step_seconds([costed], frame.pattern, order)[0])
    bounds = BoundBook(costs, loads, [scenario.recipe], [policy], [sms], [plan.zero_stage], [placement])
    bound = float(bounds.step([frame], frame.pattern, stages).min())
    evidence = [costed.table.evidence, *(part.evidence for part in costed.sync)]
    notes = combined((part, 1.0) for part in evidence).notes
    return _finished(job, frame, stages, (seconds, bound), notes)


def _laid_out(job: ResolvedJob) -> tuple[Frame, StageAssignment, PlanCosts]:
    """The plan with its schedule and stages, checked as for a simulation, and its costs."""
    scenario, plan, batch = job.scenario, job.scenario.parallel, job.scenario.batch
    check_sms(scenario.communication.sms, job.cluster)
    check_hardware(scenario, job.cluster)
    check_ranges(scenario)
    check_dispatcher(scenario, job.cluster, job.layout)
    count = microbatches(job.layout, batch.sequences)
    shaped = pattern(scenario.schedule, plan.pp, count, plan.vpp, scenario.software.awaited_sends)
    check_against_model(plan, job.shape, batch.sequence_length, shaped.n_stages)
    check_combination(scenario, shaped.samples[0], job.shape, job.cluster.node.n_gpus)
    costs = PlanCosts(job, evidence=True)
    pricer = costs.pricer(plan, scenario.recipe, scenario.recompute)
    stages = assign_stages(scenario, pricer, shaped.samples[0])
    return Frame(plan, scenario.schedule, count, job.layout, shaped), stages, costs


def _finished(
    job: ResolvedJob,
    frame: Frame,
    stages: StageAssignment,
    times_s: tuple[float, float],
    notes: frozenset[str],
) -> Estimate:
    """The estimate; `times_s`: (step time, lower bound)."""
    scenario, cluster, seconds = job.scenario, job.cluster, times_s[0]
    tokens = scenario.batch.sequences * scenario.batch.sequence_length
    run_s = -(-scenario.run.tokens // tokens) * seconds
    gpu_hours, price = run_s / SECONDS_PER_HOUR * cluster.n_gpus, cluster.price_per_gpu_hour
    report = memory_of(job.scenario, job.shape, job.cluster, stages, frame.in_flight, frame.microbatches)
    return Estimate(
        scenario=scenario.name,
        inputs=inputs_of(scenario, CLOSED_FORM),
        step_time_s=seconds,
        error=CLOSED_FORM_ERROR,
        lower_bound_s=times_s[1],
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_gpu=tokens / seconds / cluster.n_gpus,
        memory=fullest_of(report, range(frame.plan.pp)),
        days=run_s / SECONDS_PER_DAY,
        gpu_hours=gpu_hours,
        cost_usd=None if price is None else gpu_hours * price.value,
        stages=tuple(describe(stages).splitlines()),
        profile=job.profile.name,
        profile_hash=profile_hash(job.profile),
        extrapolated=tuple(sorted(notes)),
        seed=scenario.seed,
        version=__version__,
        defaults=scenario.defaults_on([cluster]),
    )
