"""What the planner claims to gain over plans that a trainer's own team tuned and published.

A claim of more than a few percent is something that the team could not run, or a mistake of the model. Both
sides have one model, machine, batch, precision and trainer release, and the same software.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.summary_text import gib
from moesim.hwmodels.validation import nearest, validate_model
from moesim.simulator.common.processes import without_cyclic_collection, worker_pool
from moesim.simulator.model.recompute import parse_recompute, recompute_label
from moesim.simulator.planner.goal import Goal, no_progress
from moesim.simulator.planner.result import PlanRow
from moesim.simulator.planner.search import plan_cluster
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.step import run_step
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.sections import Stages
from moesim.simulator.scoring import published_records
from moesim.simulator.scoring.scoreboard.rows import open_rows
from moesim.simulator.scoring.scoreboard.score import prepared_row
from moesim.simulator.studies.compare import band_of_margin, relative_draws
from moesim.simulator.trainers.registry import trainer_of
from moesim.simulator.trainers.trainer import Trainer

FILE = "tuned-plans.csv"
ROUNDS = 3
"""Most searches of one claim: each is around the winner of the one before, and the last finds nothing."""

SIMULATED = 3
"""Families of plans that the engine simulates in each search; the closed form alone is not sure enough."""

INCOMPARABLE = "not comparable"
"""Begins the reason of a claim over a plan whose own memory is not predicted right."""

OF_TENSOR = ("sequence_parallel",)
"""Keys of a plan that follow its degree of tensor parallelism."""


class TunedPlan(Frozen):
    """A plan that a team tuned and published; the fields are the columns of `tuned-plans.csv`."""

    id: str
    """Of a row of `open-rows.csv`, or a preset."""
    trainer: str
    """What limits the search, as for `moesim plan --trainer`; empty for no limit."""
    team: str
    remark: str = ""
    """What of a claim the team could not run, or why it is wrong; empty for a claim below 10 %."""


class KeyShare(Frozen):
    """The change of one or several keys on the way from the tuned plan to the winner, and what it saves."""

    keys: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    saved: float
    """Seconds over the step of the tuned plan."""

    def __str__(self) -> str:
        """The keys with both values, and the share."""
        parts = zip(self.keys, self.before, self.after, strict=True)
        return ", ".join(f"{key} {old} -> {new}" for key, old, new in parts) + f" ({self.saved:+.1%})"


class ExpertGap(Frozen):
    """A tuned plan and the best plan of its surroundings; `gain` is its step over the winner's, minus 1."""

    id: str
    title: str
    trainer: str
    team: str
    remark: str
    tuned: str = ""
    tuned_s: float | None = None
    winner: str = ""
    winner_s: float | None = None
    gain: float | None = None
    behind: Band | None = None
    """`gain` with its interval (docs/model.md, eq. U8)."""
    shares: tuple[KeyShare, ...] = ()
    refused: str = ""


def tuned_plans() -> tuple[TunedPlan, ...]:
    """The shipped list."""
    records = published_records(FILE)
    return tuple(validate_model(TunedPlan, record, f"{FILE}:{n}") for n, record in enumerate(records, 2))


def scenario_of(tuned: TunedPlan) -> Scenario:
    """The scenario of a tuned plan. Raises InputError for an unknown id."""
    row = next((row for row in open_rows() if row.id == tuned.id), None)
    return load_scenario(tuned.id) if row is None else prepared_row(row).scenario


def trainer_named(name: str) -> Trainer | None:
    """What a team's trainer can run; None for a trainer that has no description (DeepSeek's own).

    The team did train the model, whatever features of it moesim cannot spell.
    """
    if not name:
        return None
    trainer = trainer_of(name)
    return replace(trainer, exclusions=tuple(e for e in trainer.exclusions if "features" not in e.reads))


def around(scenario: Scenario, trainer: Trainer | None) -> PlanSpace:
    """The surroundings of a scenario's plan: every degree halved, kept and doubled.

    ZeRO stages are all that shard optimizer states, recompute is the scenario's, and what the trainer repeats
    as a whole. Precision and communication SMs stay.
    """
    plan, shape, gpus = scenario.parallel, scenario.shape, scenario.machine.node.n_gpus
    near: dict[str, tuple[int, ...]] = {
        key: _near(getattr(plan, key)) for key in ("tp", "pp", "cp", "vpp", "microbatch")
    }
    search = {"recompute": ("none", "selective", "full")} if trainer is None else trainer.search
    dense = shape.moe is None and "recompute_dense" in search
    alone = [c for c in search["recompute_dense" if dense else "recompute"] if "+" not in c]
    return PlanSpace(
        **near | {"tp": tuple(n for n in near["tp"] if n <= gpus), "vpp": tuple({1, *near["vpp"]})},
        ep=None if shape.moe is None else tuple(n for n in _near(plan.ep) if not shape.moe.experts % n),
        expert_tp=(plan.expert_tp,),
        zero_stage=(1, 2, 3),
        recompute=(*dict.fromkeys([scenario.recompute, *map(parse_recompute, alone)]),),
        precision=(scenario.precision,),
        sms=(scenario.communication.sms,),
        placement=("in order",),
    )


def _near(value: int) -> tuple[int, ...]:
    return tuple(n for n in (value // 2, value, 2 * value) if n)


def winner_of(scenario: Scenario, trainer: Trainer | None) -> PlanRow | None:
    """The best plan that a walk from a scenario's own reaches; None where no plan around it is faster.

    Raises InfeasibleError where no plan around the scenario's fits.
    """
    best: PlanRow | None = None
    step_s = run_step(scenario).time_s
    for _ in range(ROUNDS):
        here = scenario if best is None else best.scenario
        with without_cyclic_collection():
            space, goal = around(here, trainer), Goal(top=SIMULATED)
            found = plan_cluster(here, space, goal, no_progress, None, trainer).best
        if found.time_s >= step_s:
            break
        best, step_s = found, found.time_s
    return best


def step_of(scenario: Scenario) -> float | None:
    """Seconds of a scenario's step; None for an illegal plan."""
    try:
        return run_step(scenario).time_s
    except MoesimError:
        return None


def ablated(
    tuned: Scenario, winner: Scenario, step: Callable[[Scenario], float | None] = step_of
) -> tuple[KeyShare, ...]:
    """The keys in which two plans differ, in the order of what each saves once those before are changed.

    Keys that are legal only together are changed together. The shares add up to the whole difference.
    """
    values = {key: (_value(tuned, key), _value(winner, key)) for key in _keys(tuned, winner)}
    left, done = list(values), list[str]()
    shares: list[KeyShare] = []
    first = at_s = step(tuned) or 0.0
    while left:
        tried = [([key], step(_between(tuned, winner, [*done, key]))) for key in left]
        if all(seconds is None for _, seconds in tried):
            pairs = [[a, b] for n, a in enumerate(left) for b in left[n + 1 :]]
            tried = [(pair, step(_between(tuned, winner, [*done, *pair]))) for pair in pairs]
        legal = [(seconds, keys) for keys, seconds in tried if seconds is not None]
        seconds, keys = min(legal, default=(step(winner) or 0.0, list(left)))
        shares.append(
            KeyShare(
                keys=tuple(keys),
                before=tuple(values[key][0] for key in keys),
                after=tuple(values[key][1] for key in keys),
                saved=(at_s - seconds) / first,
            )
        )
        at_s, done, left = seconds, [*done, *keys], [key for key in left if key not in keys]
    return tuple(shares)


def _keys(tuned: Scenario, winner: Scenario) -> list[str]:
    keys = [key for key in (*ParallelPlan.model_fields, "schedule", "recompute") if key not in OF_TENSOR]
    found = [key for key in keys if _value(tuned, key) != _value(winner, key)]
    return [*found, *(["stages"] if tuned.stages != winner.stages else [])]


def _value(scenario: Scenario, key: str) -> str:
    if key == "stages":
        layers = scenario.stages.layers
        return "balanced" if layers is None else " ".join(map(str, (layers[0], "..", layers[-1])))
    if key == "recompute":
        return recompute_label(scenario.recompute)
    return str(getattr(scenario if key == "schedule" else scenario.parallel, key))


def _between(tuned: Scenario, winner: Scenario, changed: Iterable[str]) -> Scenario:
    """The tuned plan with some keys of the winner; stages that neither plan has are balanced anew."""
    changed = set(changed)
    names = {key for key in changed if key in ParallelPlan.model_fields}
    names |= set(OF_TENSOR) if "tp" in names else set()
    update: dict[str, Any] = {
        "parallel": tuned.parallel.model_copy(update={n: getattr(winner.parallel, n) for n in names})
    }
    update |= {key: getattr(winner, key) for key in ("schedule", "recompute") if key in changed}
    cut = [key for key in ("pp", "vpp", "schedule") if _value(tuned, key) != _value(winner, key)]
    if "stages" in changed and changed.issuperset(cut):
        update["stages"] = winner.stages
    elif "stages" in changed or changed.intersection(cut):
        update["stages"] = Stages()
    return tuned.model_copy(update=update)


def gap_of(tuned: TunedPlan) -> ExpertGap:
    """What the planner claims over one tuned plan, or why there is no claim."""
    common = {"id": tuned.id, "trainer": tuned.trainer, "team": tuned.team, "remark": tuned.remark}
    try:
        own, trainer = scenario_of(tuned), trainer_named(tuned.trainer)
        if trainer is not None:  # both sides as the trainer runs them
            own = trainer.adapted(own, any_plan=True)[0]
        machine = own.machine
        title = (
            f"{own.shape.name}, {machine.n_gpus} {machine.accelerator.name}, {own.recipe.linear}, "
            f"{own.batch.sequences} x {own.batch.sequence_length}"
        )
        step = run_step(own)
        said = {"title": title, "tuned": _label(own), "tuned_s": step.time_s}
        own_s, memory = step.time_s, step.prepared.memory
        if not memory.fits:
            sizes = f"{gib(memory.total_bytes)} of {gib(memory.capacity_bytes)} GiB"
            return ExpertGap(
                **common, **said, refused=f"{INCOMPARABLE}: it ran and is predicted not to fit ({sizes})"
            )
        best = winner_of(own, trainer)
    except (InputError, InfeasibleError) as error:
        return ExpertGap(**common, title=tuned.id, refused=str(error))
    if best is None:
        return ExpertGap(**common, **said, winner=_label(own), winner_s=own_s, gain=0.0)
    gain = own_s / best.time_s - 1.0
    return ExpertGap(
        **common,
        **said,
        winner=_label(best.scenario),
        winner_s=best.time_s,
        gain=gain,
        behind=band_of_margin(gain, relative_draws(best.scenario), relative_draws(own)),
        shares=ablated(own, best.scenario),
    )


def _label(scenario: Scenario) -> str:
    """The plan in the field's shorthand, without degrees of 1."""
    plan = scenario.parallel
    degrees = {"TP": plan.tp, "PP": plan.pp, "VPP": plan.vpp, "CP": plan.cp, "EP": plan.ep}
    parts = [f"{name}{n}" for name, n in degrees.items() if n > 1]
    return " ".join(
        [*parts, f"MBS{plan.microbatch}", f"ZeRO-{plan.zero_stage}", recompute_label(scenario.recompute)]
    )


def expert_gaps(ids: Sequence[str] = (), workers: int = 1) -> Iterator[ExpertGap]:
    """The claims over some tuned plans, by default all. Raises InputError for an id that is not listed."""
    known = {plan.id: plan for plan in tuned_plans()}
    for name in ids:
        if name not in known:
            raise InputError(
                f"{name[:60]!r} is no tuned plan{nearest(name, list(known))}; known: {', '.join(known)}"
            )
    chosen = [known[name] for name in ids or known]
    if workers == 1:
        yield from map(gap_of, chosen)
        return
    with worker_pool(workers) as pool:
        yield from pool.map(gap_of, chosen)


def summary(gaps: Sequence[ExpertGap]) -> dict[str, float]:
    """Number of plans, and the median and the worst of the gains where there is one."""
    gains = [gap.gain for gap in gaps if gap.gain is not None]
    return {"plans": len(gains), "median": median(gains), "worst": max(gains)} if gains else {"plans": 0}
