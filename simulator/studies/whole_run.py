"""Predicts the whole run with an uncertain step time, so that its end and cost include that uncertainty."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text, write_atomically
from moesim.hwmodels.price import RentPrice, load_prices
from moesim.hwmodels.provenance import Sourced, sourced_numbers
from moesim.hwmodels.validation import nearest
from moesim.hwmodels.yaml_io import EXTENSIONS, parse_mapping
from moesim.simulator.engine.records import Execution, step_time_s
from moesim.simulator.predict.report import step_energy
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import StepEnergy
from moesim.simulator.predict.step import Prepared, execute, prepare
from moesim.simulator.predict.summarise import run_report
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.inputs import EVENTS, inputs_of
from moesim.simulator.scenario.run_plan import default_stops
from moesim.simulator.studies.effects import SAMPLES, draws_s, entry_effects, generator_of

ORDER = "run.replicas"
"""Name of the random stream that assigns points of the distribution to replicas."""


def step_factors(prepared: Prepared, executions: Sequence[Execution], replicas: int) -> FloatArray:
    """Step time relative to the predicted one for every replica [replicas], distributed as in eq. U2.

    The replicas take evenly spaced points of the sorted draws, so that their percentiles are those of all
    draws. A seeded order, independent of the stops, assigns the points; it is the same in every scenario.
    """
    time = step_time_s(executions)
    drawn = np.sort(draws_s(time, entry_effects(prepared, executions))) / time
    points = ((np.arange(replicas) + 0.5) * (len(drawn) / replicas)).astype(np.int64)
    order = np.argsort(generator_of(ORDER, prepared.scenario.seed).random(replicas), kind="stable")
    return np.asarray(drawn[points][order])


def uncertain_report(
    prepared: Prepared, executions: Sequence[Execution], known_s: float | None = None
) -> RunReport:
    """The report of a simulated scenario, with a step time drawn for every replica.

    `known_s`: step time (s) to use instead of the simulated one. Raises as `run_report` does.
    """
    plan = prepared.scenario.run
    # Without failures replicas cost nothing; as many as there are draws give the interval of the step itself.
    factors = step_factors(prepared, executions, plan.replicas if plan.interrupted else SAMPLES)
    simulated_s = step_time_s(executions)
    energy = None if prepared.of_fleet else step_energy(prepared, executions, simulated_s)
    return run_report(prepared, simulated_s if known_s is None else known_s, factors, energy)


def with_default_stops(scenario: Scenario) -> tuple[Scenario, tuple[Default, ...]]:
    """The scenario with failures, restart and checkpoints by rule where it does not mention failures.

    A fleet, whose run is refused, and a scenario that states `run.failures`, if only as `none`, stay as they
    are. Returns the keys that were chosen as well.
    """
    if scenario.fleet is not None or scenario.run.failures is not None:
        return scenario, ()
    chosen = default_stops(scenario.run, scenario.machine)
    stops = {key: one.value for key, one in chosen.items()}
    return scenario.replace(run=stops), tuple(one.default for one in chosen.values())


def predict_run(
    scenario: Scenario,
    step_time_s: float | None = None,
    uncertainty: bool | None = None,
    energy: StepEnergy | None = None,
) -> RunReport:
    """Predict the whole run of a scenario; see `run_report`.

    Failures that the scenario does not mention are those of `with_default_stops`, which the report lists.
    `uncertainty` includes that of the step time; by default it is on unless `step_time_s` is given. With a
    given `step_time_s` and no uncertainty, only further phases are simulated; `energy` is then that of the
    step, without which nodes draw their power under load.
    """
    with_stops, assumed = with_default_stops(scenario)
    report = _report(prepare(with_stops), step_time_s, uncertainty, energy)
    engine = EVENTS if step_time_s is None else f"step time given: {step_time_s} s"
    return report.model_copy(update={"inputs": inputs_of(scenario, engine), "defaults": assumed})


def _report(
    prepared: Prepared, step_time_s: float | None, uncertainty: bool | None, energy: StepEnergy | None
) -> RunReport:
    if uncertainty is None:
        uncertainty = step_time_s is None
    if not uncertainty and step_time_s is not None:
        return run_report(prepared, step_time_s, energy=energy)
    step = execute(prepared)
    if uncertainty:
        return uncertain_report(prepared, step.executions, step_time_s)
    return run_report(prepared, step.time_s, energy=step_energy(prepared, step.executions, step.time_s))


def with_uncertain_run(prepared: Prepared, executions: Sequence[Execution], result: Result) -> Result:
    """The result with the uncertain step time in the report of its run, if it has one."""
    if result.run.report is None:
        return result
    report = uncertain_report(prepared, executions)
    return result.model_copy(update={"run": result.run.model_copy(update={"report": report})})


# -- assumptions -------------------------------------------------------------------------------------
# The table of what a bill stands on, for people who edit it: exported as CSV or YAML, and read back.

COLUMNS = ("key", "value", "term", "kind", "source", "date", "what")
MOST_TABLE_BYTES = 1_000_000
WHAT = {
    "cluster.price_per_gpu_hour": "rent of one GPU for one hour",
    "cluster.node.power": "a whole node under load",
    "cluster.energy.electricity_price": "electricity of the site",
    "cluster.energy.pue": "energy of the site over that of its machines",
    "cluster.energy.carbon_intensity": "carbon of the site's electricity",
    "run.price.offer": "rent of one GPU for one hour, in place of the cluster's",
    "run.price.discount": "share off the price",
    "run.price.commitment": "time paid for whatever the run takes",
    "run.preemption.rate": "how often a spot node is taken away",
}
"""Meaning of rows for people; other rows are figures of the run plan or of a purchase."""
_OF_CLUSTER = ("price_per_gpu_hour", "energy.", "node.power")


def assumptions(scenario: Scenario) -> list[dict[str, str]]:
    """Every sourced figure of a scenario's bill and run plan, as rows of `COLUMNS`; raises for a fleet."""
    if scenario.fleet is not None:
        raise scenario.needs_one_cluster()
    cluster, run = scenario.machine, scenario.run
    rows = [
        (f"cluster.{path}", number)
        for path, number in sourced_numbers(cluster)
        if path.startswith(_OF_CLUSTER)
    ]
    rows += [(f"run.{path}", number) for path, number in sourced_numbers(run)]
    if run.price is not None and run.price.rent is not None:
        rows.append(("run.price.offer", load_prices(cluster.accelerator.name).choose(run.price.rent)))
    return [_row(key, number) for key, number in sorted(rows, key=lambda row: row[0])]


def _row(key: str, number: Sourced) -> dict[str, str]:
    term = ""
    if isinstance(number, RentPrice):
        term = number.term if number.years is None else f"{number.term} {number.years:g}"
    texts = (key, number.text, term, number.kind, number.source, number.date, WHAT.get(key, ""))
    return dict(zip(COLUMNS, texts, strict=True))


def write_assumptions(scenario: Scenario, path: Path) -> int:
    """Write the table as CSV, or YAML by the file's name; returns its number of rows."""
    rows, text = assumptions(scenario), io.StringIO()
    if path.suffix.lower() in EXTENSIONS:
        text.write("".join(f"{json.dumps(row['key'])}: {_flow(row)}\n" for row in rows))
    else:
        table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    write_atomically(path, [text.getvalue()])
    return len(rows)


def _flow(row: Mapping[str, str]) -> str:
    return json.dumps({name: row[name] for name in COLUMNS[1:]}, ensure_ascii=False)


def with_assumptions(scenario: Scenario, path: Path) -> tuple[Scenario, list[str]]:
    """The scenario with the rows of an edited table that differ from its own, and their keys.

    Raises InputError for rows that the scenario does not have, repeated rows, and values that are illegal.
    """
    own = {row["key"]: row for row in assumptions(scenario)}
    changes: dict[str, str] = {}
    seen: set[str] = set()
    for number, row in enumerate(_read_table(path), start=2):
        place, key = f"{path}, row {number}", str(row.get("key") or "").strip()
        if key not in own:
            raise InputError(
                f"{place}: {key or 'a row without a key'} is no assumption of {scenario.name}"
                f"{nearest(key, list(own))}; it has {', '.join(own)}"
            )
        if key in seen:
            raise InputError(f"{place}: {key} stands there twice; keep one row of it")
        seen.add(key)
        before = own[key]
        now = {name: str(row.get(name) or before[name]).strip() for name in COLUMNS}
        if any(now[name] != before[name] for name in ("value", "term", "kind", "source", "date")):
            changes[key] = _override(scenario, key, now, before, path.name)
    try:
        first = sorted(changes, key=lambda key: key != "run.price.offer")  # it replaces the whole price
        return scenario.overridden(*(changes[key] for key in first)), sorted(changes)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _override(scenario: Scenario, key: str, now: dict[str, str], before: dict[str, str], file: str) -> str:
    """The override of one changed row; a value that changed alone is assumed and no longer has its source."""
    figure: dict[str, object] = {name: now[name] for name in ("value", "kind", "source", "date")}
    if now["value"] != before["value"] and now["source"] == before["source"]:
        figure |= {"kind": "assumed", "source": f"edited in {file}; before: {before['value']}"}
    if now["term"]:
        term, _, years = now["term"].partition(" ")
        figure |= {"term": term} | ({"years": float(years)} if years.replace(".", "", 1).isdigit() else {})
    if key == "run.price.offer" and scenario.run.price is not None:
        price = scenario.run.price.model_dump(mode="json", exclude_none=True, exclude={"rent", "offer"})
        return f"run.price={json.dumps(price | {'offer': figure}, ensure_ascii=False)}"
    return f"{key}={json.dumps(figure, ensure_ascii=False)}"


def _read_table(path: Path) -> list[Mapping[str, object]]:
    text = read_text(path, MOST_TABLE_BYTES, "table of assumptions")
    if path.suffix.lower() in EXTENSIONS:
        rows = parse_mapping(text, str(path))
        wrong = [key for key, row in rows.items() if not isinstance(row, Mapping)]
        if wrong:
            raise InputError(f"{path}: {wrong[0]} needs the keys {', '.join(COLUMNS[1:])} below it")
        return [{"key": key, **row} for key, row in rows.items()]
    table = csv.DictReader(io.StringIO(text))
    missing = [name for name in ("key", "value") if name not in (table.fieldnames or ())]
    if missing:
        raise InputError(
            f"{path}: columns {', '.join(missing)} are missing; a table has {', '.join(COLUMNS)}"
        )
    return list(table)
