"""How each figure of the page Run & cost comes about: formula, inputs with today's values, sources."""

from __future__ import annotations

from collections.abc import Collection

from moesim.app.explanations import Derivation, FormulaInput, sources
from moesim.app.number_text import compact, plain
from moesim.hwmodels.units import format_quantity
from moesim.simulator.predict.result import Result
from moesim.simulator.run.money import rates
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario

STOPS = "simulated from the stated failures, restarts and checkpoints (docs/model, chapter 13)"

USES = {
    "productive": ("train", "training"),
    "startup": ("start", "start-up (eq. J10)"),
    "checkpoints": ("save", "checkpoints (eqs. J2, J3)"),
    "lost": ("again", "training done again"),
    "detection": ("detect", "detection"),
    "restart": ("restart", "restarts"),
    "waiting_for_spares": ("wait", "waiting for spares"),
}
"""Symbol and meaning of each use of the job's GPU-hours."""


def derivations(
    scenario: Scenario, result: Result, report: RunReport, own: Collection[str] = ()
) -> dict[str, Derivation]:
    """How the figures of a whole run come about, by name; what the run has no price or site for is left out.

    `result` is the priced result with `report`. `own`: keys that the visitor has changed.
    """
    source = {row.path: row.source for row in sources(scenario, result, own)}
    nodes = source.get("cluster.nodes", f"stated in the scenario {scenario.name}")
    gpus = scenario.machine.n_gpus
    count = FormulaInput("N", "GPUs", float(gpus), f"{gpus:,}", nodes, "cluster.nodes")
    found = [_days(report, count), _goodput(report), _interruptions(report)]
    if report.cost_usd is not None:
        found.append(_cost(scenario, report, source))
    if report.energy_kwh is not None and report.co2_kg is not None:
        found += [_energy(scenario, report, source), _carbon(scenario, report)]
    return {row.figure: row for row in found}


def _hours(symbol: str, meaning: str, hours: float) -> FormulaInput:
    return FormulaInput(symbol, meaning, hours, f"{compact(hours)} GPU-hours", STOPS, "run.")


def _days(report: RunReport, count: FormulaInput) -> Derivation:
    parts = [
        _hours(symbol, meaning, hours)
        for key, (symbol, meaning) in USES.items()
        if (hours := float(getattr(report.gpu_hours, key))) > 0.0
    ]
    total = " + ".join(part.symbol for part in parts)
    return Derivation(
        "days",
        "Days of the whole run",
        f"({total}) / (24 * N)" if len(parts) > 1 else f"{total} / (24 * N)",
        "eqs. J1, J4, J9, J10",
        (*parts, count),
        f"The mean over the random stops of {report.replicas:,} runs.",
    )


def _goodput(report: RunReport) -> Derivation:
    own = [phase for phase in report.phases if not phase.stated]
    hours = sum(phase.gpu_hours for phase in own)
    total = sum(phase.gpu_hours_with_stops for phase in own)
    return Derivation(
        "goodput",
        "Goodput",
        "train / all",
        "eq. J5",
        (_hours("train", "training", hours), _hours("all", "training and stops", total)),
        f"The mean of the shares of {report.replicas:,} runs; the share of the means is {hours / total:.2%}. "
        f"The closed form gives {report.goodput_expected:.1%}.",
    )


def _interruptions(report: RunReport) -> Derivation:
    causes = tuple(
        FormulaInput(f"n{number}", row.cause, row.interruptions, plain(row.interruptions), STOPS, "run.")
        for number, row in enumerate(report.causes, 1)
    )
    return Derivation(
        "interruptions",
        "Interruptions",
        " + ".join(cause.symbol for cause in causes) or "0",
        "eq. J4",
        causes,
        "" if causes else "The run states no failures.",
    )


def _time(report: RunReport) -> FormulaInput:
    days = report.days.predicted
    return FormulaInput("T", "days of the whole run", days, f"{days:,.1f} days", STOPS, "run.")


def _cost(scenario: Scenario, report: RunReport, source: dict[str, str]) -> Derivation:
    run = scenario.run
    bill = rates(scenario.machine, run.price, run.spares.count if run.spares else 0)
    wanted = "cluster.price_per_gpu_hour" if run.price is None else "run.price"
    find = wanted if any(wanted in path for path in source) else "price"  # a published offer has no row
    parts = tuple(
        FormulaInput(f"r{number}", f"{part}, an hour", usd, f"${compact(usd)}", report.price, find)
        for number, (part, usd) in enumerate((bill.usd_per_hour or {}).items(), 1)
    )
    total = " + ".join(part.symbol for part in parts)
    return Derivation(
        "cost_usd",
        "Cost of the whole run",
        f"T * 24 * ({total})" if len(parts) > 1 else f"T * 24 * {total}",
        "eq. J7",
        (_time(report), *parts),
        f"For {bill.gpus:,} GPUs with the spares.",
    )


def _energy(scenario: Scenario, report: RunReport, source: dict[str, str]) -> Derivation:
    machine, site = scenario.machine, scenario.machine.energy
    assert site is not None  # the report has an energy
    spares = scenario.run.spares.count if scenario.run.spares else 0
    nodes, power = machine.nodes + spares, machine.node.n_gpus * machine.node.power_w_per_gpu
    inputs = (
        _time(report),
        FormulaInput(
            "nodes",
            "nodes and spares",
            float(nodes),
            f"{nodes:,}",
            source.get("cluster.nodes", f"stated in the scenario {scenario.name}"),
            "cluster.nodes",
        ),
        FormulaInput(
            "P_node",
            "power of a node under load",
            power,
            format_quantity(power, "w"),
            source.get("cluster.node.power", "the node's description"),
            "power",
        ),
        FormulaInput(
            "PUE", "power usage effectiveness", site.pue.value, plain(site.pue.value), site.pue.source, "pue"
        ),
    )
    return Derivation("energy_kwh", "Energy", "T * 24 * nodes * P_node / 1000 * PUE", "eq. J8", inputs)


def _carbon(scenario: Scenario, report: RunReport) -> Derivation:
    site, energy = scenario.machine.energy, report.energy_kwh
    assert site is not None and energy is not None
    intensity = site.carbon_intensity
    inputs = (
        FormulaInput(
            "kWh", "energy", energy.predicted, f"{compact(energy.predicted)} kWh", "eq. J8", "cluster.energy"
        ),
        FormulaInput(
            "intensity",
            "CO₂e of a kWh",
            intensity.value,
            f"{plain(intensity.value, 4)} kg",
            intensity.source,
            "carbon_intensity",
        ),
    )
    return Derivation("co2_kg", "CO₂e", "kWh * intensity", "eq. J8", inputs)
