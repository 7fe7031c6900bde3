"""Compares clusters for one training job: the best plan on each, per GPU, per dollar and per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec import Struct
from pydantic import Field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster, list_clusters, load_cluster
from moesim.hwmodels.confidence import Confidence
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.node import Node
from moesim.hwmodels.price import (
    RentChoice,
    RentPrice,
    Term,
    list_prices,
    list_purchases,
    load_prices,
    load_purchase,
    mixed_terms,
)
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.memory.gpu import Verdict
from moesim.simulator.planner.goal import OnProgress, no_progress, scaled
from moesim.simulator.planner.result import PlanRow
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.work_size import Band
from moesim.simulator.run.bill import rates
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.scenario.defaults import network_of, paid_share, with_default_price
from moesim.simulator.scenario.inputs import Inputs, inputs_of
from moesim.simulator.scenario.run_plan import Price, RunPlan
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.studies.compare import bands_of_changes, bands_of_draws, predicted_with_draws
from moesim.simulator.studies.reprice import repriced, unpriced

# -- other cluster -----------------------------------------------------------------------------------
# The same training job on another cluster: its size, its network, and the keys that fit its accelerator.

ODD_FACTORS = (1, 3, 5, 7)
"""Odd factors of a number of nodes into which batches and layers usually split."""


def own_cluster(scenario: Scenario, name: str) -> bool:
    """Whether a name means the scenario's own cluster, with the changes that the scenario states."""
    return scenario.machine.name == name


def machine_of(scenario: Scenario, name: str) -> Cluster:
    """The scenario's own cluster, or the shipped one of this name; raises InputError for an unknown name."""
    if own_cluster(scenario, name):
        return scenario.machine
    if name not in list_clusters():
        raise InputError(f"cluster {name!r} is not shipped{nearest(name, list(list_clusters()))}")
    return with_default_price(load_cluster(name))


def on_cluster(scenario: Scenario, name: str, gpus: int | None = None) -> Scenario:
    """The scenario's model, batch and run on a shipped cluster, or on its own where `name` is that.

    `gpus`: number of accelerators; None keeps the cluster's own number. What only the old accelerator has is
    left to the rules, as for every override (`moesim.simulator.scenario.machine`). Degrees of parallelism
    stay as they are: they are what a search replaces. A network that does not join the nodes gives way to the
    smallest shipped one that does. Raises InputError for an unknown cluster, and for a number of GPUs that is
    no whole number of nodes or that no shipped network joins.
    """
    own, cluster = own_cluster(scenario, name), machine_of(scenario, name)
    nodes = cluster.nodes if gpus is None else whole_nodes(cluster.node, gpus)
    changes: dict[str, Any] = {} if own else {"cluster": name}
    if nodes != cluster.nodes:
        changes["cluster.nodes"] = nodes
        network = _network(cluster, nodes)
        if network is not None:
            changes["cluster.network"] = network
    return scenario.replace(**changes) if changes else scenario


def whole_nodes(node: Node, gpus: int) -> int:
    """Number of nodes with exactly this many accelerators; raises InputError where none is."""
    per_node = node.n_gpus
    nodes, rest = divmod(gpus, per_node)
    if rest or not nodes:
        near = sorted({max(1, nodes) * per_node, (nodes + 1) * per_node})
        numbers = " and ".join(f"{number:,}" for number in near)
        raise InputError(
            f"{gpus:,} {node.accelerator.name} are not a whole number of nodes, as a node has "
            f"{per_node:,} of them; near to it {'is' if len(near) == 1 else 'are'} {numbers}",
            key="gpus",
            nearest=near,
        )
    return nodes


def even_nodes(most: int) -> int:
    """The largest number of nodes up to `most` (at least 1) of the form 1, 3, 5 or 7 times a power of two."""
    return max(odd << k for odd in ODD_FACTORS for k in range(most.bit_length()) if odd << k <= most)


def _network(cluster: Cluster, nodes: int) -> str | None:
    """A shipped network for `nodes` nodes where the cluster's own does not join them; None where it does."""
    try:
        cluster.model_copy(update={"nodes": nodes}).topology()
    except InputError:
        pass
    else:
        return None
    try:
        return network_of(cluster.node, nodes)
    except InputError as error:
        raise InputError(
            f"{nodes:,} nodes of {cluster.name} cannot be joined: its network {cluster.network.name} has no "
            f"room for them, and no other is known ({error})"
        ) from None


# -- payment -----------------------------------------------------------------------------------------
# One way to pay for any cluster: its own price, a rent by term, or a purchase.

Payment = Literal["as stated", "on-demand", "reserved", "spot", "capacity-block", "purchase"]
PAYMENTS: tuple[Payment, ...] = get_args(Payment)
"""Ways to pay: each cluster's own price, one of the terms of rent, or buying the hardware."""


def price_under(cluster: Cluster, payment: Payment) -> RentPrice | None:
    """Price of one GPU for one hour, with its source; None where the cluster states no price of its own.

    A rent is the latest shipped offer of its term, the cheapest of one date, as in `run.price.rent`; GPUs of
    a node that are paid but not used are in it. A purchase is all that an hour of owned hardware costs,
    divided by the GPUs (docs/model.md, eq. J7). Raises InputError where nothing is known for a payment.
    """
    if payment == "as stated":
        return cluster.price_per_gpu_hour
    chip = cluster.accelerator.name
    if payment == "purchase":
        names = list_purchases(cluster.accelerator.name)
        if not names:
            raise InputError(f"no purchase of {cluster.accelerator.name} is known")
        buy = load_purchase(names[0])
        bill = rates(cluster, Price(buy=buy), 0)
        usd_per_hour = bill.usd(1.0)
        assert usd_per_hour is not None
        return RentPrice(
            term="purchase",
            value=usd_per_hour / bill.gpus,
            kind="derived",
            source=f"{bill.described}: hardware, building, upkeep and electricity for each hour of use",
            date=buy.system_per_gpu.date,
        )
    known = {offer.term for offer in load_prices(chip).offers} if chip in list_prices() else set()
    term: Term = payment
    if term not in known:
        offered = f"; offers: {', '.join(sorted(known))}" if known else ""
        raise InputError(f"no {payment} price of {chip} is known{offered}")
    offer = load_prices(chip).choose(RentChoice(term=term))
    share = paid_share(cluster.node)
    if share == 1.0:
        return offer
    source = f"{offer.source}; times {share:g}: spare GPUs are paid"
    return offer.model_copy(update={"value": offer.value * share, "kind": "derived", "source": source})


def paid(scenario: Scenario, payment: Payment) -> Scenario:
    """The scenario with the price of a payment as its cluster's price; raises InputError as `price_under`."""
    if payment == "as stated":
        return scenario
    price = price_under(scenario.machine, payment)
    assert price is not None
    plain = RentPrice(**{name: getattr(price, name) for name in RentPrice.model_fields})
    cluster = scenario.machine.model_copy(update={"price_per_gpu_hour": plain})
    return scenario.model_copy(update={"cluster": cluster})


LEAST, MOST = 2, 6
"""Fewest and most clusters in one comparison."""

Search = Literal["narrow", "whole"]
"""How plans are searched: in `narrow_space`, or in the planner's whole default space."""

SEARCHED = 0.85
"""Share of the progress at which the search is done and the interval of the best plan begins."""
JOULES_PER_KWH = 3.6e6
KWH = "kwh_per_billion_tokens"

FIGURES = (
    "step_time_s",
    "tokens_per_s_per_gpu",
    "mfu_causal",
    "usd_per_billion_tokens",
    "tokens_per_usd",
    "gpu_hours_per_billion_tokens",
    "days",
    "gpu_hours",
    "cost_usd",
)
"""Figures of a row that have an interval; `KWH` is added where the board's power is known."""


class ClusterPlan(Struct, frozen=True):
    """The best plan of a scenario on one cluster, without prices; `problem` says why there is none.

    `scenario` is that of the plan, with the whole run of the scenario; `draws` [SAMPLES] are the
    `relative_draws` of its step time. `plan` holds the searched plan; both are None with a problem.
    """

    cluster: str
    search: Search
    machine: Cluster | None
    scenario: Scenario | None = None
    result: Result | None = None
    draws: FloatArray | None = None
    plan: PlanRow | None = None
    considered: int = 0
    problem: str = ""


class ClusterRow(Frozen):
    """One cluster of a comparison. Figures are None or absent where they are not known, never zero."""

    cluster: str
    accelerator: str
    n_gpus: int | None
    nodes: int | None
    search: Search
    problem: str = ""
    """Why there is no plan for this cluster; empty where there is one."""
    inputs: Inputs | None = None
    """The best plan as a scenario, before the payment; None with a problem."""
    plan: str | None = None
    precision: str | None = None
    recompute: str | None = None
    considered: int = 0
    """Plans that the search considered."""
    fits: bool | None = None
    verdict: Verdict | None = None
    """`fits`, `at risk` or `does not fit` (docs/model.md, eq. M10)."""
    memory_bytes: float | None = None
    profile: str | None = None
    confidence: Confidence | None = None
    usd_per_gpu_hour: float | None = None
    price: RentPrice | None = None
    term: str = Field("", exclude_if=lambda term: not term)
    """Term of the price in words; empty without one."""
    price_problem: str = ""
    """Why there is no price with the chosen payment."""
    figures: dict[str, Band] = Field(default_factory=dict)
    """Predicted value, P10, P50 and P90 by name (`FIGURES`, `KWH`)."""
    differences: dict[str, Band] = Field(default_factory=dict)
    """This cluster minus the first one, from random draws that they share; empty for the first."""


class HardwareComparison(TableResult):
    """Clusters side by side for one model, batch and run, each with the best plan found on it."""

    scenario: str
    inputs: Inputs
    """The job that was moved; every cluster's row has the scenario of its own plan."""
    payment: Payment
    clusters: tuple[ClusterRow, ...]
    warnings: tuple[str, ...] = Field((), exclude_if=lambda value: not value)
    """That costs stand side by side on different terms, in words."""

    def rows(self) -> list[Row]:
        """One row for each cluster, with its plan, its figures and their ends."""
        return [_flat(row) for row in self.clusters]


def compare_hardware(
    scenario: AnyScenario,
    clusters: Sequence[str],
    *overrides: str,
    gpus: int | Mapping[str, int] | None = None,
    usd_per_hour: float | None = None,
    payment: Payment = "as stated",
    search: Search = "whole",
    workers: int = 1,
    progress: OnProgress | None = None,
) -> HardwareComparison:
    """Plan a scenario's model, batch and run on each of two to six clusters, and compare the best plans.

    `clusters`: names of shipped clusters, or the name of the scenario's own. `gpus`: accelerators of each,
    one number for all or by cluster; absent, the cluster's own number. `usd_per_hour`: instead, what a
    cluster may cost an hour. `payment`: how every cluster is paid. `search`: `narrow` keeps the scenario's
    ZeRO stage and context parallelism and takes seconds. `progress` is called with the share of the work (0
    to 1) and a text. A cluster that cannot run the job has a row with the reason. Raises InputError for
    another number of clusters, for contradictory sizes, and for another payment or search.
    """
    scenario = load_scenario(scenario, overrides)
    if isinstance(clusters, str) or not all(isinstance(name, str) for name in clusters):
        raise InputError(f"compare_hardware: clusters is a list of names, not {repr(clusters)[:80]}")
    for key, value, known in (("search", search, get_args(Search)), ("payment", payment, PAYMENTS)):
        if value not in known:
            raise InputError(
                f"{key}={value!r} is not one of {', '.join(known)}{nearest(str(value), list(known))}",
                key=key,
                nearest=known,
            )
    if isinstance(gpus, Mapping) and (strange := [name for name in gpus if name not in clusters]):
        raise InputError(f"gpus: {strange[0]!r} is none of the clusters{nearest(strange[0], list(clusters))}")
    if not LEAST <= len(clusters) <= MOST or len(set(clusters)) != len(clusters):
        raise InputError(f"compare_hardware takes {LEAST} to {MOST} different clusters, not {list(clusters)}")
    if gpus is not None and usd_per_hour is not None:
        raise InputError("compare_hardware: give gpus or usd_per_hour, not both")
    say, plans = progress or no_progress, []
    for number, name in enumerate(clusters):
        part = scaled(say, number / len(clusters), (number + 1) / len(clusters))
        size = gpus.get(name) if isinstance(gpus, Mapping) else gpus
        try:
            if usd_per_hour is not None:
                size = gpus_for(scenario, name, usd_per_hour, payment)
        except InputError as error:
            plans.append(ClusterPlan(name, search, None, problem=str(error)))
            continue
        plans.append(plan_on(scenario, name, size, search=search, workers=workers, progress=part))
    return hardware_comparison(scenario, plans, payment)


def gpus_for(scenario: Scenario, name: str, usd_per_hour: float, payment: Payment) -> int:
    """Accelerators of a cluster that cost at most so many dollars an hour together (whole, even nodes).

    Raises InputError where the cluster has no price, and where one node costs more.
    """
    cluster = machine_of(scenario, name)
    price = price_under(cluster, payment)
    if price is None or price.value <= 0.0:
        raise InputError(f"no price of {cluster.accelerator.name} is known: its size for a budget is unknown")
    per_node = cluster.node.n_gpus * price.value
    if per_node > usd_per_hour:
        raise InputError(f"one node costs ${per_node:,.2f} an hour, more than ${usd_per_hour:,.2f}")
    return even_nodes(int(usd_per_hour / per_node * (1.0 + 1e-9))) * cluster.node.n_gpus


def narrow_space(scenario: Scenario) -> PlanSpace:
    """A space that a search finishes in seconds.

    ZeRO stage, context parallelism and communication SMs are the scenario's, interleaving and placements of
    experts are left out; TP, PP, EP, micro-batch, recompute and the schedules without interleaving are free.
    """
    own = scenario.parallel
    return PlanSpace(
        cp=(own.cp,),
        vpp=(1,),
        zero_stage=(own.zero_stage,),
        microbatch=tuple(sorted({1, 2, own.microbatch})),
        sms=(scenario.communication.sms,),
        precision=(scenario.precision,),
        schedule=tuple(name for name, spec in SCHEDULES.items() if not spec.free_vpp),
    )


def plan_on(
    scenario: Scenario,
    name: str,
    gpus: int | None = None,
    *,
    search: Search = "whole",
    workers: int = 1,
    progress: OnProgress | None = None,
) -> ClusterPlan:
    """The fastest plan for a scenario's job on one cluster, with the draws of its interval.

    `gpus` and the keys that change with the accelerator: see `on_cluster`. The recipe stays the scenario's
    where the accelerator has it. Input that is illegal on this cluster, and a job that fits with no plan,
    become the result's `problem`.
    """
    say = progress or no_progress
    machine: Cluster | None = None
    try:
        machine = machine_of(scenario, name)
        there = on_cluster(scenario, name, gpus)
        machine = there.machine
        alone = there.model_copy(update={"run": RunPlan(tokens=there.run.tokens)})
        space = narrow_space(there) if search == "narrow" else PlanSpace(precision=(there.precision,))
        say(0.0, f"searching plans on {name}")
        searched = plan(alone, space, top=1 if search == "narrow" else 3, workers=workers,
                     progress=scaled(say, 0.0, SEARCHED))  # fmt: skip
        say(SEARCHED, f"how sure the best plan on {name} is")
        # A narrow space may lack the scenario's own plan.
        own = (searched.own,) if searched.own is not None and searched.own.verdict == "fits" else ()
        best = min((searched.best, *own), key=lambda row: row.time_s)
        result, draws = predicted_with_draws(best.scenario)
    except (InputError, InfeasibleError) as error:
        return ClusterPlan(name, search, machine, problem=str(error))
    say(1.0, f"{name} is planned")
    return ClusterPlan(
        cluster=name,
        search=search,
        machine=machine,
        scenario=best.scenario.model_copy(update={"run": there.run}),
        result=unpriced(result, best.scenario),
        draws=draws,
        plan=best,
        considered=searched.considered,
    )


def hardware_comparison(
    scenario: Scenario, plans: Sequence[ClusterPlan], payment: Payment = "as stated"
) -> HardwareComparison:
    """The comparison of finished plans under one payment: arithmetic, so that other terms cost nothing."""
    rows: list[ClusterRow] = []
    first: tuple[ClusterPlan, Result] | None = None
    for planned in plans:
        row, result = _row(scenario, planned, payment)
        if planned is plans[0] and result is not None:
            first = planned, result
        elif first is not None and result is not None:
            row = row.model_copy(update={"differences": _differences(first, (planned, result))})
        rows.append(row)
    return HardwareComparison(
        scenario=scenario.name,
        inputs=inputs_of(scenario),
        payment=payment,
        clusters=tuple(rows),
        warnings=mixed_terms({row.cluster: row.term for row in rows if row.term}),
    )


def priced_scenario(planned: ClusterPlan, payment: Payment) -> Scenario | None:
    """The scenario of a cluster's best plan with the price of a payment; None where there is no plan."""
    if planned.scenario is None:
        return None
    try:
        return paid(planned.scenario, payment)
    except InputError:
        return planned.scenario


def _row(scenario: Scenario, planned: ClusterPlan, payment: Payment) -> tuple[ClusterRow, Result | None]:
    """(row without differences, priced result) of one cluster; no result where there is no plan."""
    machine = planned.machine
    base = ClusterRow(
        cluster=planned.cluster,
        accelerator="unknown" if machine is None else machine.accelerator.name,
        n_gpus=None if machine is None else machine.n_gpus,
        nodes=None if machine is None else machine.nodes,
        search=planned.search,
        problem=planned.problem,
    )
    if planned.scenario is None or planned.result is None or planned.draws is None or planned.plan is None:
        return base, None
    price, problem = None, ""
    try:
        price = price_under(planned.scenario.machine, payment)
    except InputError as error:
        problem = str(error)
    cluster = planned.scenario.machine.model_copy(update={"price_per_gpu_hour": price})
    alone = planned.scenario.model_copy(
        update={"cluster": cluster, "run": RunPlan(tokens=planned.scenario.run.tokens)}
    )
    result = repriced(planned.result, alone)
    bands = bands_of_draws(result, planned.draws)
    figures = {name: bands[name] for name in FIGURES if name in bands}
    kwh = _kwh(planned)
    if kwh is not None:
        figures[KWH] = Band.of(kwh, kwh * planned.draws)
    row = base.model_copy(
        update={
            "inputs": inputs_of(planned.scenario),
            "plan": planned.plan.label,
            "precision": planned.plan.precision,
            "recompute": planned.plan.recompute,
            "considered": planned.considered,
            "fits": result.memory.fits,
            "verdict": result.memory.verdict,
            "memory_bytes": result.memory.total_bytes,
            "profile": result.profile,
            "confidence": result.confidence,
            "usd_per_gpu_hour": None if price is None else price.value,
            "price": price,
            "term": "" if price is None else price.label,
            "price_problem": problem,
            "figures": figures,
        }
    )
    return row, result


def _kwh(planned: ClusterPlan) -> float | None:
    """Energy of a billion tokens (kWh), every board at its power limit; None where that is unknown."""
    assert planned.plan is not None and planned.scenario is not None
    energy = planned.plan.energy_j
    return None if energy is None else energy / JOULES_PER_KWH / planned.scenario.run.tokens * 1e9


def _differences(first: tuple[ClusterPlan, Result], other: tuple[ClusterPlan, Result]) -> dict[str, Band]:
    (plan_a, result_a), (plan_b, result_b) = first, other
    assert plan_a.draws is not None and plan_b.draws is not None
    bands = bands_of_changes(result_a, plan_a.draws, result_b, plan_b.draws)
    changes = {name: bands[name] for name in FIGURES if name in bands}
    before, after = _kwh(plan_a), _kwh(plan_b)
    if before is not None and after is not None:
        changes[KWH] = Band.of(after - before, after * plan_b.draws - before * plan_a.draws)
    return changes


def _flat(row: ClusterRow) -> Row:
    """A row as plain columns; those that a printed comparison shows come first."""
    plain = {name: None if (band := row.figures.get(name)) is None else band.predicted for name in FIGURES}
    flat: dict[str, Any] = {
        "cluster": row.cluster,
        "n_gpus": row.n_gpus,
        "step_time_s": plain.pop("step_time_s"),
        "usd_per_billion_tokens": plain.pop("usd_per_billion_tokens"),
        "confidence": row.confidence,
        "plan": row.plan,
        "problem": row.problem or row.price_problem,
        **plain,
    }
    for name, band in row.figures.items():
        flat |= {name: band.predicted, f"{name}_p10": band.p10, f"{name}_p90": band.p90}
    names = (
        "accelerator",
        "precision",
        "recompute",
        "fits",
        "verdict",
        "memory_bytes",
        "profile",
        "usd_per_gpu_hour",
    )
    return {**flat, **{name: getattr(row, name) for name in names}}
