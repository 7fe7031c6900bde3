"""Downloads: results as JSON, CSV and Parquet, scenarios as YAML, and traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moesim.app.uploads import TOKEN, portable
from moesim.hwmodels.yaml_io import MAX_YAML_BYTES, dump_mapping
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario

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


def result_row(result: Result) -> dict[str, Cell]:
    """A result's figures by dotted path, as one row of a table of results.

    Lists (ranks, sources) are left out. Units are in the names, as in the JSON.
    """
    return dict(_flat(result.model_dump(mode="json"), ""))


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
    rows = [result_row(result) for result in results]
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
