"""What ties a scenario to its accelerator: the checks, and what is left to the rules on another accelerator.

Profile, number formats, communication kernels and their SMs are stated for one accelerator. Every change of
accelerator, by an override, by `Scenario.replace` or in a comparison of hardware, follows `left_to_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from moesim.hwmodels.calibration import CalibrationProfile, fitting_profiles
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import Sourced
from moesim.simulator.dispatchers.registry import check_known, check_runs, dispatcher
from moesim.simulator.frameworks.registry import NONE
from moesim.simulator.model.precision import Precision
from moesim.simulator.scenario import defaults as rules
from moesim.simulator.scenario.framework import FRAMEWORK, HOST
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.sections import Communication
from moesim.simulator.scenario.stated import Fillable, is_stated

NAMES_A_MACHINE = ("cluster", "cluster.accelerator", "cluster.node", "cluster.node.accelerator")
"""Keys that may bring another accelerator; `fleet` and all keys below it may as well."""

OF_ONE_MACHINE = ("name", "description", "profile", "without_entries", "faults", HOST)
"""Keys that say something about one machine and nothing about another."""

MAY_STAY = (
    "precision",
    FRAMEWORK,
    "communication.kernels",
    "communication.sms",
    "variation.clock_cv",
    "variation.jitter_cv",
)
"""Keys that stay on another accelerator if it can keep them and they were more than the rule's choice."""


class OnMachine(Fillable, Protocol):
    """The parts of a scenario that depend on its accelerator."""

    @property
    def recipe(self) -> Precision:
        """The precision recipe."""

    @property
    def communication(self) -> Communication:
        """Communication kernels."""

    @property
    def parallel(self) -> ParallelPlan:
        """Degrees of parallelism."""


def may_change_machine(key: str) -> bool:
    """Whether an override of a dotted key may bring another accelerator."""
    return key in NAMES_A_MACHINE or key.split(".")[0] == "fleet"


def left_to_rules(before: OnMachine, after: OnMachine, own: Collection[str]) -> tuple[str, ...]:
    """Stated keys that `after`, a scenario moved from the machines of `before`, leaves to the rules.

    `own`: the keys that the user states together with the move, which stay as they are, as do the sections
    that hold them. On the same accelerators nothing is left. On others these are the keys of one machine
    (`OF_ONE_MACHINE`), and those of `MAY_STAY` whose value the new accelerator does not have or the rules
    would have chosen on the old one.
    A stated precision stays wherever the accelerator has its formats.
    """
    old, new = before.machines, after.machines
    if {m.accelerator.name for m in new} <= {m.accelerator.name for m in old}:
        return ()
    kept = {".".join(parts[: n + 1]) for parts in (key.split(".") for key in own) for n in range(len(parts))}
    stated = [key for key in (*OF_ONE_MACHINE, *MAY_STAY) if is_stated(after, key) and key not in kept]
    return tuple(
        key
        for key in stated
        if key in OF_ONE_MACHINE or _is_refused(after, key) or _is_choice_of_rule(before, key)
    )


def _is_choice_of_rule(scenario: OnMachine, key: str) -> bool:
    """Whether the rules would choose the stated value of a key on the scenario's own machines."""
    if key == "precision" or (key == FRAMEWORK and scenario.software.framework == NONE):
        return False
    stated: object = scenario
    for part in key.split("."):
        stated = getattr(stated, part)
    chosen = rules.RULES[key](scenario, scenario.shape, scenario.machines).value
    if isinstance(stated, Sourced) and isinstance(chosen, Sourced):
        return bool(getattr(stated, "value", None) == getattr(chosen, "value", None))
    return bool(stated == chosen)


def _is_refused(scenario: OnMachine, key: str) -> bool:
    """Whether one of the scenario's machines does not take the stated value of a key of `MAY_STAY`."""
    communication = scenario.communication
    for machine in scenario.machines:
        checks: dict[str, Callable[[Cluster], object]] = {
            "precision": lambda m: check_precision(scenario.recipe, m),
            FRAMEWORK: lambda m: rules.check_vendor(scenario.software.framework, m),
            "communication.sms": lambda m: check_sms(communication.sms, m),
            "communication.kernels": lambda m: check_kernels(communication.kernels, m),
        }
        try:
            if key in checks:
                checks[key](machine)
        except InputError:
            return True
        served = dispatcher(communication.kernels).serves(machine.node, machine.nodes)
        if key == "communication.kernels" and not served:
            return True
    return False


# -- checks ----------------------------------------------------------------------------------------------


def check_machine(scenario: OnMachine, cluster: Cluster, profile: CalibrationProfile) -> None:
    """Raise InputError for an unknown dispatcher, or for all keys that do not fit the accelerator."""
    communication, problems = scenario.communication, []
    check_known(communication.kernels, profile)
    checks: list[Callable[[], None]] = [
        lambda: check_profile(profile, cluster),
        lambda: check_precision(scenario.recipe, cluster),
        lambda: check_sms(communication.sms, cluster),
    ]
    if scenario.parallel.ep > 1:
        checks.append(lambda: check_kernels(communication.kernels, cluster))
    for check in checks:
        try:
            check()
        except InputError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if not problems:
        return
    # All problems in one text, with the overrides that mend them together.
    keys = [str(problem.key) for problem in problems]
    chosen = [f"{key}={rules.RULES[key](scenario, scenario.shape, (cluster,)).value}" for key in keys]
    listed = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
    raise InputError(
        f"{len(problems)} keys do not fit {cluster.accelerator.name}: {listed}. To leave all of them to the "
        f"rules, which choose {', '.join(chosen)}: {' '.join(f'--set {key}=null' for key in keys)}",
        key=problems[0].key,
    )


def check_precision(recipe: Precision, cluster: Cluster) -> None:
    """Raise InputError for a format that the tensor cores do not have.

    Scales by blocks (NVFP4, MXFP8) are applied by the tensor cores that have FP4.
    """
    accelerator = cluster.accelerator
    has = tuple(name for name in ("fp8", "bf16") if name in accelerator.peak)
    if recipe.blocks and "fp4" not in accelerator.peak and has:
        what = "linear=fp4" if recipe.linear == "fp4" else "scaling=mx"
        nearest = "linear: fp8, scaling: tensor" if "fp8" in has else "linear: bf16"
        raise InputError(
            f"precision.{what}: the tensor cores of {accelerator.name} do not apply scales of 16 or 32 "
            f"elements; precisions that it has are {', '.join(sorted(has))}: write {nearest}, or choose an "
            "accelerator with fp4, such as b200-sxm",
            key="precision",
            nearest=(nearest,),
        )
    try:
        accelerator.peak_flop_per_s(recipe.linear)
    except InputError as error:
        raise InputError(
            f"precision: linear={recipe.linear}, but {error}", key="precision", nearest=has
        ) from None


def check_profile(profile: CalibrationProfile, cluster: Cluster) -> None:
    """Raise InputError for a profile that does not apply to the cluster's accelerator."""
    accelerator = cluster.accelerator.name
    if profile.accelerator == "any" or accelerator in (profile.accelerator, *profile.also_for):
        return
    fitting = fitting_profiles(accelerator)
    raise InputError(
        f"profile={profile.name} was taken on {profile.accelerator}, but the cluster has {accelerator}; use "
        f"{' or '.join(fitting)} (the last one prices from datasheet peaks)",
        key="profile",
        nearest=fitting,
    )


MOST_OF_DEEPEP = 24
"""SMs that are offered in the place of a number that leaves none for compute."""


def check_sms(sms: int, cluster: Cluster) -> None:
    """Raise InputError where communication reserves more SMs than the accelerator can spare."""
    engine = cluster.accelerator.communication_engine
    if engine is not None and sms:
        raise InputError(
            f"communication.sms={sms}: on {cluster.accelerator.name} a dedicated engine ({engine.name}) "
            f"moves collectives, no {cluster.accelerator.unit_name} does; set communication.sms=0",
            key="communication.sms",
            nearest=(0,),
        )
    if sms == 0:
        return
    total = cluster.accelerator.n_sms
    if sms >= total:
        raise InputError(
            f"communication.sms={sms} leaves no SM for compute: {cluster.accelerator.name} has {total}; "
            f"use at most {total - 1} (DeepEP uses 20 to 24)",
            key="communication.sms",
            nearest=(min(MOST_OF_DEEPEP, total - 1),),
        )


def check_kernels(name: str, cluster: Cluster) -> None:
    """Raise InputError for a dispatcher whose kernels are not written for the cluster's accelerator."""
    check_runs(name, lambda kind: kind.refuses(cluster.accelerator))
