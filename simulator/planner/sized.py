"""Sizes of a training job: the scenario at each, the plans that are searched there, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal

from pydantic import Field

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import Confidence
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.node import load_node, part_of_node
from moesim.hwmodels.provenance import SourcedUsdPerHour
from moesim.hwmodels.summary_text import short, table_lines
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.common.texts import parse_integers
from moesim.simulator.memory.gpu import Verdict
from moesim.simulator.model.counts import expert_parameters, parameters_mtp, parameters_total
from moesim.simulator.planner.hardware import Payment, narrow_space, on_cluster, whole_nodes
from moesim.simulator.planner.search import own_plan, space_of_plan
from moesim.simulator.planner.space import LISTS, PlanSpace
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import Default, node_of
from moesim.simulator.scenario.inputs import Inputs

SizingSearch = Literal["narrow", "whole", "own"]
Curve = Literal["strong", "weak"]
Limit = Literal["deadline", "budget"]
WINS = {"gpus": "fewest GPUs", "cost": "cheapest", "time": "fastest"}
"""What a size can win, by the objective that asks for it."""

BRIEF = 240
"""Characters of a reason in a table."""
COMMUNICATION = ("waiting for communication", "gradients and parameters over the network")
"""Mechanisms of a step that are exposed communication."""


# -- sizes -------------------------------------------------------------------------------------------
# The same job on other numbers of accelerators.

SIZE_KEYS = ("cluster.nodes", "cluster.gpus")
"""Keys that a sizing varies."""
DOUBLINGS = 6
"""Sizes by rule, each twice the one before."""
LEAST_BYTES_PER_PARAMETER = 12.0
"""What all GPUs together hold of a parameter at least: weight, gradient and two moments of 16 bits, and a
master weight of 32 bits (eqs. M1 to M3). Sizes by rule begin where that fits."""
MOST_GPUS = 1 << 20


def at_size(scenario: Scenario, accelerator: str | None, key: str, value: int) -> Scenario:
    """The scenario on `value` nodes or GPUs (`key`) of an accelerator with its usual node and network.

    None, and the scenario's own accelerator, keep its cluster and change the size alone. Raises InputError
    for a size that is no whole number of nodes (or a part of one), and that no network joins.
    """
    own = scenario.machine
    other = accelerator is not None and accelerator != own.accelerator.name
    node = load_node(node_of(str(accelerator))) if other else own.node
    nodes, part = value, key == "cluster.gpus" and value < node.n_gpus
    if key == "cluster.gpus":
        nodes = 1 if part else whole_nodes(node, value)
    if other:
        size = {"nodes": nodes, "gpus": value} if part else {"nodes": nodes}
        return scenario.replace(cluster={"accelerator": accelerator, **size})
    if part:
        single = own.model_copy(update={"node": part_of_node(node, value), "nodes": 1})
        return scenario.model_copy(update={"cluster": single})
    return on_cluster(scenario, own.name, nodes * node.n_gpus)


def sizes_by_rule(scenario: Scenario) -> tuple[int, ...]:
    """Doubling numbers of GPUs, from the first whose memory holds `LEAST_BYTES_PER_PARAMETER`."""
    trained = parameters_total(scenario.shape) + parameters_mtp(scenario.shape)
    least = trained * LEAST_BYTES_PER_PARAMETER / scenario.machine.accelerator.hbm_bytes
    first = scenario.machine.node.n_gpus
    while first < least:
        first *= 2
    return tuple(first << k for k in range(DOUBLINGS) if first << k <= MOST_GPUS)


def listed_sizes(values: str | int | Sequence[int], key: str) -> tuple[int, ...]:
    """Sizes of an expression (`64..1024:x2`), a number or a list. Raises InputError for one below 1."""
    numbers = parse_integers(values, key) if isinstance(values, str) else values
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_GPUS:
            raise InputError(
                f"{key}={number!r} is no size: write whole numbers from 1 to {MOST_GPUS:,}, such as "
                "64..1024:x2",
                key=key,
                nearest=(1,),
            )
    if not numbers:
        raise InputError(f"{key} is an empty list: no size is left", key=key)
    return tuple(sorted(set(numbers)))


def sizes_asked(
    scenario: Scenario,
    names: Sequence[str | None],
    nodes: str | int | Sequence[int] | None,
    gpus: str | int | Sequence[int] | None,
) -> list[tuple[str | None, str, int]]:
    """The sizes to try as (accelerator, key, value): those that are stated, or those by rule."""
    if nodes is not None and gpus is not None:
        raise InputError("size: give nodes or gpus, not both")
    asked: list[tuple[str | None, str, int]] = []
    stated = nodes if gpus is None else gpus
    for name in names:
        if stated is not None:
            key = SIZE_KEYS[nodes is None]
            asked += [(name, key, value) for value in listed_sizes(stated, key)]
        else:
            there = scenario if name is None else at_size(scenario, name, "cluster.nodes", 1)
            asked += [(name, "cluster.gpus", value) for value in sizes_by_rule(there)]
    return asked


def sizing_space(scenario: Scenario, wanted: PlanSpace, search: SizingSearch) -> PlanSpace:
    """The plans that are searched at one size: what the space states, else by the kind of search.

    `narrow` is `narrow_space` with one sequence a micro-batch (or the scenario's), at least two layers a
    stage, and without gpipe, which has the bubble of 1f1b and more in memory. Models with experts have at
    most twice the scenario's TP, and no EP with which the experts alone fill the memory. `own` keeps the
    scenario's plan, so that only data parallelism changes, even where its memory is at risk.
    """
    stated = {key: getattr(wanted, key) for key in (*LISTS, "headroom") if getattr(wanted, key) is not None}
    if search == "own":
        layout = "balanced" if scenario.stages.layers is None else "scenario"
        own = space_of_plan(scenario, own_plan(scenario), {})
        return own.model_copy(update={"layout": layout, "headroom": 0.0} | stated)
    base = PlanSpace(precision=(scenario.precision,))
    if search == "narrow":
        gpus, narrow = scenario.machine.n_gpus, narrow_space(scenario)
        most = max(scenario.parallel.pp, scenario.shape.n_layers // 2)
        base = narrow.model_copy(
            update={
                **_degrees_of_experts(scenario, most),
                "microbatch": tuple(sorted({1, scenario.parallel.microbatch})),
                "pp": tuple(pp for pp in range(1, min(gpus, most) + 1) if gpus % pp == 0),
                "schedule": tuple(name for name in narrow.schedule or () if name != "gpipe"),
            }
        )
    return base.model_copy(update={"layout": wanted.layout} | stated)


def _degrees_of_experts(scenario: Scenario, stages: int) -> dict[str, tuple[int, ...]]:
    """TP and EP that a narrow search tries for a model with experts; nothing for any other model.

    `stages`: most pipeline stages. An expert's weights, and its gradients where they are not sharded, have at
    least 16 bits.
    """
    shape, own = scenario.shape, scenario.parallel
    if shape.moe is None:
        return {}
    experts, node = shape.moe.experts, scenario.machine.node.n_gpus
    routed = sum(shape.is_moe_layer(layer) for layer in range(shape.n_layers))
    bytes_each = 4.0 if own.zero_stage < 2 else 2.0 if own.zero_stage == 2 else 0.0
    held = expert_parameters(shape) * experts * routed * bytes_each
    room = scenario.machine.accelerator.hbm_bytes * stages * own.expert_tp
    eps = tuple(ep for ep in range(1, experts + 1) if experts % ep == 0 and held <= room * ep)
    tps = tuple(1 << k for k in range(node.bit_length()) if 1 << k <= min(node, 2 * own.tp))
    return {"tp": tuple(sorted({*tps, own.tp})), "ep": eps or (experts,)}


def divides(scenario: Scenario, space: PlanSpace, gpus: int) -> bool:
    """Whether some degrees of a space split GPUs and batch evenly, which costs no prices."""
    sequences = scenario.batch.sequences
    for tp in space.tp or (1, 2, 4, 8):
        for cp in space.cp or (1, 2, 4, 8):
            for pp in space.pp or range(1, scenario.shape.n_layers + 1):
                copies, rest = divmod(gpus, tp * cp * pp)
                if not rest and any(sequences % (copies * size) == 0 for size in space.microbatch or (1,)):
                    return True
    return False


# -- results -----------------------------------------------------------------------------------------


def energy_of_size(cluster: Cluster, mean_board_w: float | None, wall_s: float) -> dict[str, Any]:
    """Power limit and mean power (the limit where it is unknown) of a board, and the energy of all (J)."""
    limit_w = cluster.accelerator.tdp_w if cluster.accelerator.tdp else None
    mean_w = limit_w if mean_board_w is None else mean_board_w
    pue = cluster.energy.pue.value if cluster.energy else 1.0
    energy_j = None if mean_w is None else mean_w * pue * cluster.n_gpus * wall_s
    return {"board_w": limit_w, "mean_board_w": mean_w, "energy_j": energy_j}


class SizedPlan(Frozen):
    """The best plan at one size; figures of money are None where nobody has a price.

    It is a scenario too: `moesim.simulate(size)` simulates its plan.
    """

    accelerator: str
    n_gpus: int
    nodes: int
    node: str
    network: str
    nic_bytes_per_s: float | None
    """Nominal rate of one NIC in one direction."""
    profile: str
    confidence: Confidence | None
    """What the rates stand on; None in closed form."""
    plan: str
    precision: str
    recompute: str
    source: Literal["simulated", "closed form"]
    step_time_s: float
    mfu_causal: float | None
    """Causal MFU of the simulated step; None in closed form."""
    tokens_per_s_per_gpu: float
    memory_bytes: float
    verdict: Verdict
    training_days: float
    """Days without stops."""
    days: float
    """Days with the stops of the run, as `moesim run` expects them in closed form (eq. J5)."""
    gpu_hours: float
    """GPU-hours with stops."""
    cost_usd: float | None
    """Of all GPU-hours, those of spare nodes (`run.spares`) among them."""
    tokens_per_usd: float | None
    price: SourcedUsdPerHour | None
    """Price of a GPU for an hour, under the payment of the sizing."""
    price_problem: str = ""
    board_w: float | None
    """Power limit of a board."""
    mean_board_w: float | None
    """Mean power of a board by what runs (eq. C34); its limit in closed form."""
    energy_j: float | None
    """Energy of all days at the mean power of the boards, times the site's PUE; None if unknown."""
    within: bool
    """Whether the size keeps all limits."""
    spread: Band | None = None
    """Step time over the predicted one; None in closed form. Days and cost spread alike."""
    causes_s: dict[str, float] = Field(default_factory=dict)
    """Seconds of the simulated step by mechanism (eq. P4)."""
    inputs: Inputs
    """The plan as a scenario, before the payment."""

    def __repr__(self) -> str:
        """The size in words."""
        return sized_text(self)

    def band(self, name: str) -> Band | None:
        """A figure that is in proportion to the step (or one over it) with P10, P50 and P90; None without."""
        value, spread = getattr(self, name), self.spread
        if value is None or spread is None:
            return None
        ends = (spread.p10, spread.p50, spread.p90)
        if name in ("tokens_per_s_per_gpu", "tokens_per_usd", "mfu_causal"):
            ends = (1.0 / spread.p90, 1.0 / spread.p50, 1.0 / spread.p10)
        return Band(predicted=value, p10=value * ends[0], p50=value * ends[1], p90=value * ends[2])


class IllegalSize(Frozen):
    """A size at which no plan of the space runs, with the reason."""

    accelerator: str
    size: str
    reason: str

    @property
    def brief(self) -> str:
        """The beginning of the reason, for a table."""
        return self.reason if len(self.reason) <= BRIEF else f"{self.reason[:BRIEF].rsplit(' ', 1)[0]} ..."


class Sides(Frozen):
    """The sizes of one accelerator on both sides of a limit: one misses it, the next legal one keeps it.

    A deadline is kept by larger sizes, a budget by smaller ones. `between`: what became of the whole nodes
    between the two.
    """

    accelerator: str
    limit: Limit
    misses: SizedPlan | None
    keeps: SizedPlan | None
    between: str


class Bend(Frozen):
    """What a larger size loses against ideal scaling from the size before, split by mechanism (eq. P4).

    `lost_s`: seconds of a step beyond the ideal; `by_cause_s` adds up to it. `cause`: the mechanism that
    loses most. `lost`: `lost_s` over the ideal step, with its interval (eq. U8); a bend is real where that
    leaves zero out.
    """

    accelerator: str
    from_gpus: int
    to_gpus: int
    lost_s: float
    lost: Band
    cause: str
    by_cause_s: dict[str, float]

    @property
    def is_sure(self) -> bool:
        """Whether the interval of the loss leaves zero out."""
        return self.lost.has_sign


class ScalingCurve(Frozen):
    """Simulated steps of one accelerator against GPUs, and its bends."""

    accelerator: str
    kind: Curve
    """`strong`: the whole batch stays; `weak`: the batch of a GPU stays."""
    points: tuple[SizedPlan, ...]
    bends: tuple[Bend, ...]
    illegal: tuple[IllegalSize, ...]

    def exposed(self, point: SizedPlan) -> float:
        """Share of a point's step that is exposed communication."""
        return sum(point.causes_s[cause] for cause in COMMUNICATION) / point.step_time_s


class Sizing(TableResult):
    """Sizes of a training job with what each takes, and those that win within the limits."""

    scenario: str
    inputs: Inputs
    objective: str
    payment: Payment
    search: SizingSearch
    deadline_days: float | None
    budget_usd: float | None
    points: tuple[SizedPlan, ...]
    """All legal sizes, by accelerator and GPUs."""
    illegal: tuple[IllegalSize, ...]
    winners: dict[str, SizedPlan]
    """Of the sizes within the limits, by objective: gpus, cost and time; empty where none keeps them."""
    by_accelerator: tuple[SizedPlan, ...]
    """The best size of each accelerator by the objective, within the limits."""
    sides: tuple[Sides, ...]
    frontier: tuple[SizedPlan, ...]
    """Sizes that no other beats in both cost and days, fastest first."""
    nearest: tuple[SizedPlan, ...]
    """Where none keeps the limits: the sizes that come nearest, one for each limit."""
    curves: tuple[ScalingCurve, ...] = ()
    defaults: tuple[Default, ...] = ()
    """Stops of the run that a rule chose."""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> SizedPlan:
        """The winner by the objective; raises InfeasibleError, with the nearest sizes, where none is."""
        if self.objective not in self.winners:
            raise InfeasibleError(self.reason())
        return self.winners[self.objective]

    def reason(self) -> str:
        """Why no size keeps the limits, with the nearest that would."""
        limits = limits_text(self.deadline_days, self.budget_usd)
        if not self.points:
            first = "; ".join(f"{row.size} {row.accelerator}: {row.reason}" for row in self.illegal[:4])
            return f"no plan is legal and fits at any size ({first}); try other sizes, or --headroom 0"
        needs_price = self.objective == "cost" or self.budget_usd is not None
        if needs_price and all(point.cost_usd is None for point in self.points):
            return f"no size has a price ({self.points[0].price_problem}); try objective gpus or time"
        near = "; or ".join(sized_text(row) for row in self.nearest)
        return f"no size keeps {limits}; nearest: {near}"

    def rows(self) -> list[Row]:
        """One row for each legal size."""
        names = ("accelerator", "n_gpus", "plan", "step_time_s", "days", "cost_usd", "tokens_per_usd",
                 "within", "source", "training_days", "gpu_hours", "mfu_causal", "tokens_per_s_per_gpu",
                 "memory_bytes", "verdict", "energy_j", "precision", "recompute", "node", "network",
                 "profile")  # fmt: skip
        return [{name: getattr(point, name) for name in names} for point in self.points]

    def __str__(self) -> str:
        """The winners, or why there is none, with the figures of each."""
        title = f"{self.scenario}: {limits_text(self.deadline_days, self.budget_usd)}"
        if self.objective not in self.winners:
            return f"{title}\n  {self.reason()}"
        cells = [[WINS[name], *sized_cells(row)] for name, row in self.winners.items()]
        return "\n".join([title, *table_lines([["", *SIZED_HEADS], *cells])])


SIZED_HEADS = ("GPUs", "of", "plan", "step s", "days", "80 %", "M$", "80 %", "tokens/$", "GPU-hours")


def sized_cells(row: SizedPlan) -> list[str]:
    """The cells of a size below `SIZED_HEADS`; `*` marks a closed form."""
    days, cost = row.band("days"), row.band("cost_usd")
    return [
        f"{row.n_gpus:,}",
        row.accelerator,
        f"{row.plan}, {row.precision}, recompute {row.recompute}",
        f"{row.step_time_s:.4g}{'' if row.source == 'simulated' else '*'}",
        f"{row.days:.1f}",
        "" if days is None else f"{days.p10:.1f}-{days.p90:.1f}",
        "no price" if row.cost_usd is None else f"{row.cost_usd / 1e6:#.3g}",
        "" if cost is None else f"{cost.p10 / 1e6:#.3g}-{cost.p90 / 1e6:#.3g}",
        "" if row.tokens_per_usd is None else short(row.tokens_per_usd),
        short(row.gpu_hours),
    ]


def sized_text(row: SizedPlan) -> str:
    """One size in words."""
    cost = "no price" if row.cost_usd is None else f"${short(row.cost_usd)}"
    return f"{row.n_gpus:,} x {row.accelerator} ({row.plan}) take {row.days:.1f} days and {cost}"


def bend_text(bend: Bend) -> str:
    """A bend in words, with the mechanisms that matter most."""
    gaps = sorted(bend.by_cause_s.items(), key=lambda item: -abs(item[1]))[:3]
    parts = ", ".join(f"{cause} {seconds:+.3f} s" for cause, seconds in gaps)
    size = f"{bend.from_gpus:,} to {bend.to_gpus:,} GPUs"
    share = f"{bend.lost.predicted:+.1%} of the ideal step ({bend.lost.p10:+.1%} to {bend.lost.p90:+.1%})"
    if not bend.is_sure:
        return f"{size}: no sure bend, {share}: {parts}"
    return f"{size}: bend by {bend.cause}, {share}: {parts}"


def limits_text(deadline_days: float | None, budget_usd: float | None) -> str:
    """The limits in words."""
    parts = [f"{deadline_days:g} days"] if deadline_days is not None else []
    parts += [f"${short(budget_usd)}"] if budget_usd is not None else []
    return " and ".join(parts) or "no limits"


def by_days(point: SizedPlan) -> tuple[float, ...]:
    """Sorts sizes by days, then by cost."""
    return point.days, point.cost_usd or inf, float(point.n_gpus)


def by_cost(point: SizedPlan) -> tuple[float, ...]:
    """Sorts sizes by cost, then by days."""
    return point.cost_usd or inf, point.days, float(point.n_gpus)


def winners_of(points: Sequence[SizedPlan]) -> dict[str, SizedPlan]:
    """The best of some sizes by objective; none is the cheapest where none has a price."""
    if not points:
        return {}
    found = {
        "gpus": min(points, key=lambda point: (point.n_gpus, *by_cost(point))),
        "time": min(points, key=by_days),
    }
    priced = [point for point in points if point.cost_usd is not None]
    return (
        {key: found[key] for key in ("gpus",)}
        | ({"cost": min(priced, key=by_cost)} if priced else {})
        | {"time": found["time"]}
    )
