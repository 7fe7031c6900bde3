"""Downloads: results as JSON, CSV and Parquet, scenarios as YAML, and traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moesim.app.charts.style import CATEGORIES
from moesim.app.texts import compact, plain
from moesim.app.uploads import TOKEN, portable
from moesim.hwmodels.units import format_quantity
from moesim.hwmodels.yaml_io import MAX_YAML_BYTES, dump_mapping
from moesim.simulator.predict.report import mean_breakdown
from moesim.simulator.predict.result import Result
from moesim.simulator.run.bill import RunSpread
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.published import beside_published

Cell = str | int | float | bool | None

NO_PARQUET = "Parquet needs pyarrow, which is not installed here: pip install pyarrow"

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters that make a spreadsheet evaluate a cell as a formula."""


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """CSV text whose cells no spreadsheet takes for formulas. Numbers stay numbers; unknowns are empty."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)  # CRLF: a lone CR or LF inside a cell is quoted
    writer.writerow([_harmless(name) for name in header])
    writer.writerows([_harmless(cell) for cell in row] for row in rows)
    return buffer.getvalue()


def _harmless(cell: Cell) -> Cell:
    """The cell, with an apostrophe before a text that starts like a formula after any leading blanks."""
    if isinstance(cell, str) and cell.lstrip(" \ufeff\u00a0").startswith(_FORMULA):
        return f"'{cell}"
    return cell


def _flat(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Cell]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value


def result_json(result: Result) -> str:
    """The same JSON that `moesim simulate --json` prints."""
    return result.model_dump_json(indent=2) + "\n"


def result_csv(results: Sequence[Result]) -> str:
    """CSV with one line per result and one column per figure."""
    header, rows = _table(results)
    return csv_text(header, rows)


def result_parquet(results: Sequence[Result]) -> bytes | None:
    """The same table as Parquet; None where pyarrow is not installed (see NO_PARQUET)."""
    return table_parquet(*_table(results))


def table_parquet(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes | None:
    """Any table as Parquet; None where pyarrow is not installed (see NO_PARQUET)."""
    if find_spec("pyarrow") is None:
        return None
    import pyarrow
    import pyarrow.parquet

    columns = {name: [row[number] for row in rows] for number, name in enumerate(header)}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _table(results: Sequence[Result]) -> tuple[list[str], list[list[Cell]]]:
    # Figures by dotted path, with units in the names as in the JSON; lists (ranks, sources) are left out.
    rows = [dict(_flat(result.model_dump(mode="json"), "")) for result in results]
    header = list(dict.fromkeys(name for row in rows for name in row))
    return header, [[row.get(name) for name in header] for row in rows]


def scenario_yaml(scenario: Scenario) -> str:
    """A self-contained scenario file, with uploaded models, clusters and profiles written into it."""
    return portable(dump_mapping(written_out(scenario).to_dict()))


def scenario_file(scenario: Scenario) -> tuple[str, str]:
    """(text, ending) of a scenario file, which is JSON where a large profile in it exceeds YAML's limit."""
    text = scenario_yaml(scenario)
    if len(text) <= MAX_YAML_BYTES:
        return text, ".yaml"
    return portable(json.dumps(written_out(scenario).to_dict(), indent=1)), ".json"


def trace_bytes(scenario: Scenario) -> bytes:
    """A Perfetto trace (.json.gz) of the first member of every pipeline rank; in full resolution, of one
    pipeline. It simulates the step, which takes a second or more, so call it in a job."""
    from moesim.simulator.predict.step import run_step
    from moesim.simulator.predict.trace import chrome_trace, shown_gpus, shown_places, trace_info

    step = run_step(scenario)
    prepared, executions = step.prepared, step.executions
    if prepared.whole is not None:
        shown = shown_gpus(prepared, executions)
    else:
        shown = shown_places(executions[0], trace_info(prepared))
    text = json.dumps(chrome_trace(shown), separators=(",", ":"))
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def file_name(name: str, ending: str) -> str:
    """A file name for a download; it keeps letters, digits, dots and dashes, at most 80 characters."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")[:80]
    return f"{plain or 'moesim'}.{ending.lstrip('.')}"


def written_out(scenario: Scenario) -> Scenario:
    """The scenario with every uploaded description written into it, so that it can be read anywhere.

    Recorded expert counts and schedules cannot be written into a scenario; they stay names.
    """
    fleet = scenario.fleet
    if fleet is not None:
        pools = [
            pool.model_copy(
                update={"cluster": scenario.pool_machine(pool)} if _is_upload(pool.cluster) else {}
            )
            for pool in fleet.pools
        ]
        fleet = fleet.model_copy(update={"pools": tuple(pools)})
    update = {
        "model": scenario.shape if _is_upload(scenario.model) else scenario.model,
        "cluster": scenario.machine if _is_upload(scenario.cluster) else scenario.cluster,
        "profile": scenario.calibration.model_copy(update={"include": ()})
        if _is_upload(scenario.profile)
        else scenario.profile,
        "fleet": fleet,
    }
    return scenario.model_copy(update=update)


def _is_upload(value: object) -> bool:
    return isinstance(value, str) and TOKEN.fullmatch(Path(value).name) is not None


# -- html report -------------------------------------------------------------------------------------
# One result as a self-contained HTML file without scripts, with every source and every error.

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--line:#d0d7de;--soft:#57606a}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--line:#30363d;--soft:#9aa4ae}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid var(--line)}
table{border-collapse:collapse;width:100%;font-size:.875rem}
th,td{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
p.soft,li{color:var(--soft);font-size:.875rem}pre{overflow-x:auto;font-size:.8rem}svg text{fill:var(--ink)}
"""


def html_report(scenario: Scenario, result: Result) -> str:
    """The HTML report of a result and its scenario; it changes no figure of the result."""
    step = result.step
    header = ("figure", "published", "predicted", "error", "source")
    published = [
        (
            f"{row.quantity}{'' if row.unit == '1' else f', {row.unit}'}",
            plain(row.published, 4),
            plain(row.predicted, 4),
            f"{row.relative_error:+.1%}{' (calibrated on it)' if row.used_for_calibration else ''}",
            row.source,
        )
        for row in beside_published(scenario, result)
    ]
    body = [
        f"<h1>{escape(result.scenario)}</h1>",
        f"<p>{escape(scenario.description)}</p>" if scenario.description else "",
        f'<p class="soft">moesim {escape(result.version)}, seed {result.seed}, profile '
        f"{escape(result.profile)} ({escape(result.profile_hash[:12])}). "
        f"Confidence: {escape(result.confidence_reason)}</p>",
        _section(
            "Prediction", _html_report_table(("figure", "value", "remark"), _figures(result), right=(1,))
        ),
        _section("Against what was published", _html_report_table(header, published, right=(1, 2, 3)))
        if published
        else "",
        _section("Where the step goes, mean over pipeline ranks", _bars(result)),
        _section(
            "What the step waits for",
            _html_report_table(
                ("cause on the critical path", "seconds", "of the step"),
                [
                    (row.cause, f"{row.seconds:.3f}", f"{row.seconds / step.time_s:.1%}")
                    for row in result.critical_path_s
                ],
                right=(1, 2),
            ),
        ),
        _section("Memory of the fullest GPU", _memory(result)),
        "" if result.run.report is None else _run(result.run.report),
        _list("Warnings", result.warnings),
        _list(
            "Values that the scenario leaves to rules",
            [f"{d.key} = {d.text}: {d.why}" for d in result.defaults],
        ),
        _list("Extrapolated, or without a measurement", result.extrapolated),
        _section("Where every number comes from", _provenance(result)),
        _section("The scenario", f"<pre>{escape(scenario_yaml(scenario))}</pre>"),
    ]
    head = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(result.scenario)} - moesim</title><style>{STYLE}</style></head><body>"
    )
    return f"{head}{''.join(body)}</body></html>\n"


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}"


def _list(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return _section(title, '<p class="soft">none</p>')
    return _section(title, f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>")


def _html_report_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        attributes = [' class="n"' if number in right else "" for number in range(len(cells))]
        shown = (f"<{tag}{a}>{escape(cell)}</{tag}>" for a, cell in zip(attributes, cells, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _figures(result: Result) -> list[tuple[str, str, str]]:
    step, run = result.step, result.run
    least, most = f"{step.lower_bound_s:.3f} s", f"{step.upper_bound_s:.3f} s"
    bounds = f"bounds {least} (busiest resource at its best) and {most} (all in series)"
    per_gpu, noncausal = f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU", step.tflops_per_gpu_noncausal
    tokens = f"{compact(run.tokens)} tokens in {run.steps:,} steps, without stops"
    cost = "no price known" if run.cost_usd is None else f"${run.cost_usd:,.0f}"
    fit = "" if result.memory.fits else "of a plan that does not fit; "
    return [
        ("step time", f"{step.time_s:.3f} s", bounds),
        ("throughput", per_gpu, f"{step.tokens_per_s:,.0f} tokens/s"),
        ("MFU, causal", f"{step.mfu_causal:.1%}", f"{step.tflops_per_gpu_causal:.0f} TFLOP/s per GPU"),
        ("MFU, non-causal", f"{step.mfu_noncausal:.1%}", f"{noncausal:.0f} TFLOP/s per GPU"),
        ("run", f"{run.days:.1f} days", tokens),
        ("GPU-hours", f"{run.gpu_hours:,.0f}", "main phase"),
        ("cost", cost, f"{fit}main phase, at the cluster's price per GPU-hour"),
    ]


def _bars(result: Result) -> str:
    """Horizontal bars as SVG, each with its name, seconds and share of the step."""
    mean = mean_breakdown(list(result.breakdown_by_rank_s))
    height, left, wide = 28, 210, 480
    lines = []
    for number, (key, (name, colour)) in enumerate(CATEGORIES.items()):
        seconds = getattr(mean, key)
        share = seconds / result.step.time_s
        top = number * height
        lines.append(
            f'<text x="0" y="{top + 18}" font-size="14">{escape(name)}</text>'
            f'<rect x="{left}" y="{top + 5}" width="{wide * share:.1f}" height="18" fill="{colour}"/>'
            f'<text x="{left + wide * share + 8:.1f}" y="{top + 18}" font-size="14">{seconds:.3f} s, '
            f"{share:.1%}</text>"
        )
    return (
        f'<svg viewBox="0 0 820 {height * len(CATEGORIES)}" width="100%" role="img" '
        f'aria-label="Seconds of a step by part">{"".join(lines)}</svg>'
        f'<p class="soft">of these, waiting for communication: {mean.exposed_communication:.3f} s</p>'
    )


def _memory(result: Result) -> str:
    memory = result.memory
    rows = [
        (kind.replace("_", " "), format_quantity(size, "bytes"))
        for kind, size in sorted(memory.by_kind_bytes.items(), key=lambda item: (-item[1], item[0]))
    ]
    rows.append(("together", format_quantity(memory.total_bytes, "bytes")))
    rows.append(("capacity", format_quantity(memory.capacity_bytes, "bytes")))
    verdict = {"fits": "It fits.", "does not fit": "It does not fit."}.get(memory.verdict, f"{memory.risk}.")
    return f"<p>{verdict}</p>{_html_report_table(('kind', 'size'), rows, right=(1,))}"


def _run(report: RunReport) -> str:
    phases = [
        (
            phase.phase,
            "as stated" if phase.stated else f"{phase.steps:,}",
            f"{phase.days:.2f}",
            f"{phase.gpu_hours:,.0f}",
            f"{phase.gpu_hours_with_stops:,.0f}",
            "" if phase.cost_usd is None else f"${phase.cost_usd:,.0f}",
        )
        for phase in report.phases
    ]
    spreads: list[tuple[str, RunSpread | None, str]] = [
        ("days", report.days, ",.1f"),
        ("goodput", report.goodput, ".1%"),
        ("interruptions", report.interruptions, ",.1f"),
        ("cost, $", report.cost_usd, ",.0f"),
        ("energy, kWh", report.energy_kwh, ",.0f"),
        ("CO2e, kg", report.co2_kg, ",.0f"),
    ]
    rows = [
        (name, *(format(value, form) for value in (s.predicted, s.p10, s.p50, s.p90)))
        for name, s, form in spreads
        if s is not None
    ]
    header = ("phase", "steps", "days", "GPU-hours", "with stops", "cost")
    finish = report.finish
    inside = "stops only" if report.step_factor is None else "stops and the step time's uncertainty"
    when = ""
    if finish is not None:
        points = f"P10 {finish.p10}, P50 {finish.p50}, P90 {finish.p90}"
        when = f"<p>Predicted finish: {finish.predicted} ({points})</p>"
    return (
        _section("The whole run", when + _html_report_table(header, phases, right=(1, 2, 3, 4, 5)))
        + _html_report_table(("", "predicted", "P10", "P50", "P90"), rows, right=(1, 2, 3, 4))
        + f'<p class="soft">{report.replicas:,} runs simulated; percentiles hold {inside}; '
        f"{escape(report.price)}</p>" + _list("Assumed for the run", report.assumptions)
    )


def _provenance(result: Result) -> str:
    kinds = Counter(entry.kind for entry in result.provenance)
    counted = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    rows = [
        (
            entry.path,
            "see source" if entry.value is None else format_quantity(entry.value, entry.unit),
            entry.kind,
            entry.source,
            entry.date,
        )
        for entry in result.provenance
    ]
    header = ("number", "value", "kind", "source", "date")
    return f"<p>{escape(counted)}</p>{_html_report_table(header, rows, right=(1,))}"
