"""Applies other prices to a finished prediction, without simulating it again."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import provenance_rows
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import PoolResult, ProvenanceEntry
from moesim.simulator.predict.work_size import Band, Uncertainty
from moesim.simulator.run.bill import HOURS_PER_DAY, Drawn, Rates, per_hour, rates
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.inputs import inputs_of, self_contained
from moesim.simulator.studies.compare import differing_keys

MOST_KEYS = 6
"""Differing keys that an error names."""


def without_prices(scenario: Scenario) -> Scenario:
    """The scenario without price per GPU-hour, energy site and `run.price`, on which no step time depends.

    Scenarios that differ only in prices become equal, and so do a cluster given by name and the same cluster
    written out. A fleet keeps its prices: each of its pools has its own.
    """
    if scenario.fleet is not None:
        return scenario
    cluster = scenario.machine.model_copy(update={"price_per_gpu_hour": None, "energy": None})
    run = scenario.run.model_copy(update={"price": None})
    return scenario.model_copy(update={"cluster": cluster, "run": run})


def check_same(result: Result, scenario: Scenario, what: str) -> None:
    """Raise InputError, with the keys that differ, if a result is of another scenario than `scenario`."""
    own = inputs_of(scenario).scenario
    if result.inputs.scenario != own:
        _refuse(result, differing_keys(load_scenario(result), load_scenario(own)), what)


def reprice(result: Result, scenario: Scenario) -> Result:
    """Any result with the prices of `scenario`, after a check that nothing else differs.

    Raises InputError, with the keys, where something does, and if a price choice fits no offer.
    """
    bare = without_prices(scenario)
    if result.inputs.scenario == inputs_of(bare).scenario:
        return repriced(result, scenario)
    own = load_scenario(result)
    _refuse(result, differing_keys(without_prices(own), without_prices(self_contained(scenario))), "reprice")
    return repriced(unpriced(result, own), scenario)


def _refuse(result: Result, differ: Mapping[str, tuple[object, object]], what: str) -> None:
    """Raise InputError if keys differ between a result and a scenario, apart from its name."""
    keys = {key: values for key, values in differ.items() if key not in ("name", "description")}
    if not keys:
        return
    shown = [f"{key}={_short(old)} in the result, {_short(new)} here" for key, (old, new) in keys.items()]
    more = f", and {len(shown) - MOST_KEYS} more keys" if len(shown) > MOST_KEYS else ""
    raise InputError(
        f"{what}: the result of {result.scenario} is not of this scenario: {'; '.join(shown[:MOST_KEYS])}"
        f"{more}; simulate the scenario first",
        key=next(iter(keys)),
    )


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def repriced(result: Result, scenario: Scenario) -> Result:
    """The result of `scenario`, made from a result of the same scenario with other prices (eqs. J7, J8).

    `result` comes from `without_prices(scenario)`, or from a scenario without prices of its own; `reprice`
    takes any. Raises InputError if a price choice fits no offer.
    That of a fleet has its prices already.
    """
    if scenario.fleet is not None:
        return result
    cluster = scenario.machine
    price, run = cluster.price_per_gpu_hour, result.run
    report = run.report
    if report is None and scenario.run.asks_for_more:  # only the price asks for a report
        from moesim.simulator.studies.whole_run import predict_run

        report = predict_run(scenario, result.step.time_s, energy=result.energy)
        report = report.model_copy(update={"inputs": None})
    elif report is not None:
        spares = scenario.run.spares.count if scenario.run.spares else 0
        before = rates(without_prices(scenario).machine, None, spares)
        bill = rates(cluster, scenario.run.price, spares, _drawn(report, scenario))
        report = _billed(report, cluster.n_gpus, bill, before)
    known = {entry.path for entry in result.provenance}
    rows = [*provenance_rows(cluster, "cluster"), *provenance_rows(scenario.run, "scenario.run")]
    added = tuple(
        ProvenanceEntry(path=r.path, value=r.value, unit=r.unit, kind=r.kind, source=r.source, date=r.date)
        for r in rows
        if r.path not in known
    )
    cost = run.gpu_hours * price.value if price else None
    pue = None if cluster.energy is None else cluster.energy.pue.value
    return result.model_copy(
        update={
            "run": run.model_copy(
                update={"cost_usd": cost, "price_term": price.label if price else "", "report": report}
            ),
            "provenance": result.provenance + added,
            "defaults": scenario.defaults,
            "inputs": inputs_of(scenario),
            "energy": result.energy and result.energy.at_site(pue),
            "uncertainty": _with_cost(result.uncertainty, run.days, cost),
        }
    )


def unpriced(result: Result, scenario: Scenario) -> Result:
    """The result of `without_prices(scenario)`, made from that of `scenario`, exactly as simulated."""
    if scenario.fleet is not None:
        return result
    bare, report = without_prices(scenario), result.run.report
    if not bare.run.asks_for_more:  # only the price asked for a report
        report = None
    elif report is not None:
        spares = scenario.run.spares.count if scenario.run.spares else 0
        before = rates(scenario.machine, scenario.run.price, spares, _drawn(report, scenario))
        bill = rates(bare.machine, None, spares, _drawn(report, scenario))
        report = _billed(report, scenario.machine.n_gpus, bill, before)
    of_price = _stated(scenario) - _stated(bare)
    return result.model_copy(
        update={
            "run": result.run.model_copy(update={"cost_usd": None, "price_term": "", "report": report}),
            "provenance": tuple(entry for entry in result.provenance if entry.path not in of_price),
            "defaults": bare.defaults,
            "inputs": inputs_of(bare),
            "energy": result.energy and result.energy.at_site(None),
            "uncertainty": _with_cost(result.uncertainty, result.run.days, None),
        }
    )


def _drawn(report: RunReport, scenario: Scenario) -> Drawn:
    return Drawn(report.mean_w_per_gpu, report.days.predicted * HOURS_PER_DAY, scenario.run.start)


def _stated(scenario: Scenario) -> set[str]:
    """Paths of the sourced figures of a scenario's cluster and run."""
    rows = [*provenance_rows(scenario.machine, "cluster"), *provenance_rows(scenario.run, "scenario.run")]
    return {row.path for row in rows}


def _with_cost(uncertainty: Uncertainty | None, days: float, cost_usd: float | None) -> Uncertainty | None:
    """The intervals with that of the cost, which is proportional to the days."""
    if uncertainty is None:
        return None
    engine = uncertainty.by_engine
    if engine is not None:
        engine = engine.model_copy(update={"bands": _bands_with_cost(engine.bands, days, cost_usd)})
    bands = _bands_with_cost(uncertainty.bands, days, cost_usd)
    return uncertainty.model_copy(update={"bands": bands, "by_engine": engine})


def _bands_with_cost(known: Mapping[str, Band], days: float, cost_usd: float | None) -> dict[str, Band]:
    bands = {name: band for name, band in known.items() if name != "cost_usd"}
    if cost_usd is not None:
        usd_per_day = cost_usd / days
        spread = {name: value * usd_per_day for name, value in known["days"].model_dump().items()}
        bands["cost_usd"] = Band(**{**spread, "predicted": cost_usd})
    return bands


def _billed(report: RunReport, gpus: int, bill: Rates, before: Rates) -> RunReport:
    """The report with another bill; the notes of the old bill, `before`, are removed."""
    hours = report.days.predicted * HOURS_PER_DAY
    notes = tuple(note for note in report.assumptions if note not in before.notes)
    phases = tuple(
        phase.model_copy(update={"cost_usd": bill.usd(phase.gpu_hours_with_stops / gpus)})
        for phase in report.phases
    )
    electricity = bill.electricity_usd_per_hour
    return report.model_copy(
        update={
            "phases": phases,
            "cost_usd": bill.of_run(report.days),
            "cost_parts_usd": bill.parts_of_run(hours),
            "price": bill.described,
            "energy_kwh": per_hour(report.days, bill.kwh_per_hour),
            "electricity_usd": None if electricity is None else electricity * hours,
            "co2_kg": per_hour(report.days, bill.kg_co2_per_hour),
            "outlook": tuple(
                row.model_copy(update={"cost_usd": bill.usd_of_run(row.days * HOURS_PER_DAY)})
                for row in report.outlook
            ),
            "assumptions": (*notes, *(note for note in bill.notes if note not in notes)),
        }
    )


# -- fleet shares ------------------------------------------------------------------------------------
# What each pool of a fleet contributes and costs, and which one holds the others up (pure).


class PoolShare(Struct, frozen=True):
    """A pool's part of the fleet; shares are between 0 and 1.

    `busy_s` and `idle_s`: mean over its pipeline ranks; idle is the bubble. `usd`: rent of its GPUs for the
    run's main phase at the hourly price of its cluster, None where that is unknown.
    """

    pool: PoolResult
    gpu_share: float
    layer_share: float
    busy_s: float
    idle_s: float
    usd: float | None
    is_bottleneck: bool


def fleet_shares(scenario: Scenario, result: Result) -> tuple[PoolShare, ...]:
    """The pools of a finished prediction, in the order of the pipeline.

    The bottleneck is the pool whose ranks idle least: the others wait for it. Empty for a single cluster.
    """
    pools = result.pools
    if not pools:
        return ()
    hours = result.run.days * SECONDS_PER_DAY / SECONDS_PER_HOUR
    gpus, layers = sum(pool.n_gpus for pool in pools), sum(pool.layers for pool in pools)
    busiest = min(range(len(pools)), key=lambda number: (pools[number].bubble_s, number))
    return tuple(
        PoolShare(
            pool=pool,
            gpu_share=pool.n_gpus / gpus,
            layer_share=pool.layers / layers if layers else 0.0,
            busy_s=result.step.time_s - pool.bubble_s,
            idle_s=pool.bubble_s,
            usd=None
            if machine.price_per_gpu_hour is None
            else pool.n_gpus * machine.usd_per_gpu_hour * hours,
            is_bottleneck=number == busiest,
        )
        for number, (pool, machine) in enumerate(zip(pools, scenario.machines, strict=True))
    )
