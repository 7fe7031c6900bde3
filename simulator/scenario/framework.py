"""Chooses the trainer and the host of a scenario that names none, and says which plans a release cannot run.

The table is `frameworks` in `simulator/data/defaults.yaml` (docs/trainers.md, decision 0070).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pydantic import ValidationError

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.host import load_host
from moesim.hwmodels.node import Node
from moesim.hwmodels.provenance import Kind
from moesim.simulator.dispatchers.registry import DISPATCHERS
from moesim.simulator.frameworks.registry import NONE, RELEASES, release_of
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.scenario.parallel import ParallelPlan

FRAMEWORK, HOST = "software.framework", "software.host"


class _Communication(Protocol):
    @property
    def kernels(self) -> str:
        """The dispatcher."""

    @property
    def model_fields_set(self) -> set[str]:
        """Names of the stated fields."""


class Planned(Protocol):
    """The parts of a scenario that decide which trainer can run it."""

    @property
    def fleet(self) -> object:
        """Several clusters, or None."""

    @property
    def parallel(self) -> ParallelPlan:
        """The degrees of parallelism."""

    @property
    def software(self) -> Software:
        """What the framework does."""

    @property
    def schedule(self) -> str:
        """The order of the micro-batches."""

    @property
    def recompute(self) -> Recompute:
        """What the backward computes again."""

    @property
    def communication(self) -> _Communication:
        """Communication kernels."""

    @property
    def recipe(self) -> Precision:
        """The precision recipe."""


class FrameworkChoice(Frozen):
    """A line of the table: the plans whose usual trainer is a release, and why."""

    vendor: str
    release: str
    without_pipeline: bool = False
    """Only plans with one pipeline rank."""
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    why: str
    source: str

    def fits(self, scenario: Planned, machines: Sequence[Cluster]) -> bool:
        """Whether the line is about such plans on such accelerators."""
        plan = scenario.parallel
        return (
            all(machine.accelerator.vendor == self.vendor for machine in machines)
            and plan.zero_stage in self.zero_stages
            and not (self.without_pipeline and plan.pp > 1)
        )


def usual_framework(
    table: Sequence[FrameworkChoice], scenario: Planned, machines: Sequence[Cluster]
) -> tuple[str, str, str]:
    """(release, reason, source) of a scenario that names none: the first of the table that can run its plan.

    It is `none` on accelerators without a line, and where no release of the table can run the plan.
    """
    if scenario.fleet is not None:
        why = "no trainer that was read splits the layers of a pipeline over the pools of a fleet"
        return NONE, f"an ideal host and no trainer's own costs: {why}", "simulator/frameworks"
    lines = [line for line in table if line.fits(scenario, machines)]
    against: list[str] = []
    for line in lines:
        problem = next((problem for _, problem, _ in problems(line.release, scenario)), None)
        problem = problem or _contradiction(scenario.software, line.release)
        if problem is None:
            passed = f"; {'; '.join(against)}" if against else ""
            return line.release, f"{line.why}{passed}", line.source
        against.append(f"{line.release} cannot run the plan: {problem}")
    if against:
        return NONE, f"an ideal host and no trainer's own costs, since {'; '.join(against)}", "this table"
    names = ", ".join(dict.fromkeys(machine.accelerator.name for machine in machines))
    why = f"an ideal host and no trainer's own costs, since no trainer's release was read for {names}"
    return NONE, why, "simulator/frameworks"


def with_framework(software: Software, name: str) -> Software:
    """The switches with the answers of a release, which still counts as left out; raises ValidationError."""
    stated = {key: getattr(software, key) for key in software.model_fields_set}
    if "host" in stated:
        stated["host"] = stated["host"] or NONE
    answered = Software.model_validate({**stated, "framework": name})
    answered.model_fields_set.intersection_update(stated)
    return answered


def _contradiction(software: Software, name: str) -> str | None:
    """Why stated switches exclude the answers of a release; None where they do not."""
    try:
        with_framework(software, name)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return None


class Recipe(Frozen):
    """A line of the table `recipes`: switches that a release's own recipes of routed models turn on."""

    release: str
    accelerators: tuple[str, ...]
    kernels: str
    """The dispatcher."""
    formats: tuple[str, ...] = ()
    """Formats of the GEMMs as `format_of` writes them; empty: any."""
    switches: Software
    source: str

    def fits(self, scenario: Planned, machines: Sequence[Cluster]) -> bool:
        """Whether the recipe runs such a plan; layers recomputed whole exclude partial graphs."""
        return (
            scenario.software.framework == self.release
            and scenario.fleet is None
            and scenario.parallel.ep > 1
            and scenario.recompute != "full"
            and scenario.communication.kernels == self.kernels
            and all(machine.accelerator.name in self.accelerators for machine in machines)
            and (not self.formats or format_of(scenario.recipe) in self.formats)
        )


# -- plans that a release cannot run ---------------------------------------------------------------------

Problem = tuple[str, str, tuple[str | int, ...]]
"""Key of a scenario, why a release does not run its value (with the legal ones), and the legal values."""


def problems(name: str, scenario: Planned) -> Iterator[Problem]:
    """What of a scenario's plan a release cannot run, key by key."""
    limits, plan = release_of(name).limits, scenario.parallel
    if plan.pp > 1 and not scenario.schedule.lower().endswith(".csv"):
        yield from _problem("schedule", scenario.schedule, limits.schedules)
    elif plan.pp > 1 and not limits.schedule_files:
        yield (
            "schedule",
            f"schedule={scenario.schedule}: it runs schedules of its own",
            limits.schedules or (),
        )
    stages = limits.zero_stages if plan.pp == 1 else limits.zero_stages_in_pipelines
    yield from _problem("parallel.zero_stage", plan.zero_stage, stages)
    yield from _problem("precision", format_of(scenario.recipe), limits.formats)
    if isinstance(scenario.recompute, str):
        yield from _problem("recompute", scenario.recompute, limits.policies)
    elif not limits.modules:
        listed = ", ".join(scenario.recompute)
        why = f"recompute=[{listed}]: it has policies, and no list of modules"
        yield "recompute", why, limits.policies or ()
    kernels = scenario.communication.kernels
    if plan.ep > 1 and kernels in DISPATCHERS and "kernels" in scenario.communication.model_fields_set:
        yield from _problem("communication.kernels", kernels, limits.dispatchers)


def runs(name: str, key: str, value: object) -> bool:
    """Whether a release runs a value of a key of a plan space, whatever the rest of the plan."""
    limits = release_of(name).limits
    if key == "recompute" and not isinstance(value, str):
        return limits.modules
    legal: dict[str, tuple[object, ...] | None] = {
        "schedule": limits.schedules, "zero_stage": limits.zero_stages, "recompute": limits.policies,
        "precision": limits.formats,
    }  # fmt: skip
    allowed = legal.get(key)
    return allowed is None or value in allowed


def _problem(key: str, value: str | int, legal: tuple[str | int, ...] | None) -> Iterator[Problem]:
    if legal is not None and value not in legal:
        yield key, f"{key}={value} is not among its {', '.join(map(str, legal))}", legal


def format_of(recipe: Precision) -> str:
    """Format of the GEMMs with the scales of FP8: `bf16`, `fp8 tile`, `fp8 tensor`, `fp8 mx`, `fp4`."""
    return f"fp8 {recipe.scaling}" if recipe.linear == "fp8" else recipe.linear


def check_framework(scenario: Planned) -> None:
    """Raise InputError, with the nearest legal choice, where the named release cannot run the plan."""
    name = scenario.software.framework
    problem = None if name == NONE else next(problems(name, scenario), None)
    if problem is None:
        return
    key, why, legal = problem
    able = [
        other
        for other in RELEASES
        if other not in (name, NONE) and next(problems(other, scenario), None) is None
    ]
    raise InputError(
        f"{FRAMEWORK}={name} cannot run the plan: {why}; nearest: {key}={legal[0] if legal else 'null'}, or "
        f"{FRAMEWORK}={able[0] if able else NONE}",
        key=key,
        nearest=legal,
    )


# -- the host --------------------------------------------------------------------------------------------


def usual_host(node: Node, shipped: Callable[[], Node | None]) -> tuple[str | None, str, Kind, str]:
    """(host, reason, kind, source) of a node: its own, else that of the accelerator's shipped node.

    None where neither is known, which prices an ideal host.
    """
    if node.host is not None:
        stands = "taken for the host" if node.host_kind == "assumed" else "the host"
        why = f"{stands} of node {node.name}{_range_of(node.host)}"
        return node.host, why, node.host_kind, str(node.host_source)
    usual = shipped()
    if usual is None or usual.host is None:
        why = f"an ideal host, since nobody published launch times of the host of {node.accelerator.name}"
        return None, why, "assumed", "hwmodels/data/nodes"
    why = f"the usual host of {node.accelerator.name}, since node {node.name} names none"
    return usual.host, f"{why}{_range_of(usual.host)}", "assumed", str(usual.host_source)


def _range_of(name: str) -> str:
    """The range of a host's times that intervals take, as text."""
    host = load_host(name)
    number = host.factor or host.spread
    if number is None or number.between is None:
        return ""
    low, high = (end / number.value for end in number.between)
    return f"; its calls may take {low:.2f} to {high:.2f} times as long"
