"""Downloads: figures as in the result, harmless in a spreadsheet, self-contained as a page."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from moesim.app import exports
from moesim.app.exports import html_report
from moesim.simulator.engine.records import Execution
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import Prepared
from moesim.simulator.scenario import load_scenario

Run = tuple[Prepared, Execution, Result]


@pytest.mark.parametrize(
    "cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1+1", "\n=1", "\ufeff=cmd|' /C calc'!A0"]
)
def test_a_cell_that_starts_like_a_formula_is_neutralised(cell: str) -> None:
    text = exports.csv_text(("name", cell), [(cell, 1.0)])
    header, row = list(csv.reader(io.StringIO(text, newline="")))
    assert row == [f"'{cell}", "1.0"] and header == ["name", f"'{cell}"]


def test_numbers_stay_numbers_and_texts_stay_themselves() -> None:
    text = exports.csv_text(("a",), [(-1.5,), (None,), ("a=b, c",), ("1e5",)])
    assert [row[0] if row else "" for row in csv.reader(io.StringIO(text))] == [
        "a",
        "-1.5",
        "",
        "a=b, c",
        "1e5",
    ]


@pytest.mark.long
def test_the_tables_hold_the_results_figures(trace_pair: Run, home_case: Run) -> None:
    results = [home_case[2], trace_pair[2]]
    rows = list(csv.DictReader(io.StringIO(exports.result_csv(results))))
    assert [float(row["step.time_s"]) for row in rows] == [r.step.time_s for r in results]
    assert "provenance" not in rows[0] and rows[0]["profile_hash"] == results[0].profile_hash
    assert json.loads(exports.result_json(results[0]))["step"]["time_s"] == results[0].step.time_s


def test_parquet_reads_back(home_case: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    data = exports.result_parquet([home_case[2]])
    assert data is not None
    table = parquet.read_table(io.BytesIO(data))
    assert table["step.mfu_causal"][0].as_py() == home_case[2].step.mfu_causal
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    assert exports.result_parquet([home_case[2]]) is None


def test_a_scenario_file_reads_back_equal(home_case: Run, tmp_path: Any) -> None:
    scenario = home_case[0].scenario
    (tmp_path / "x.yaml").write_text(exports.scenario_yaml(scenario))
    assert load_scenario(str(tmp_path / "x.yaml")).model_dump() == scenario.model_dump()


def test_the_trace_is_one_that_opens(trace_pair: Run) -> None:
    data = exports.trace_bytes(trace_pair[0].scenario)
    trace = json.loads(gzip.decompress(data))
    assert any(event["ph"] == "X" for event in trace["traceEvents"])
    assert exports.trace_bytes(trace_pair[0].scenario) == data


@pytest.mark.parametrize("name", ["../../etc/passwd", "a b/c", "", "...", "x" * 300, 'a"\r\nSet-Cookie: x'])
def test_download_names_are_plain(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,90}", exports.file_name(name, "json"))
    assert ".." not in exports.file_name("a", ".yaml")


# -- the report -----------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Tags, attributes and text of a page; complains about what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "action") or k.startswith("on")]
        if tag not in ("meta", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_holds_figures_errors_and_sources_and_nothing_from_elsewhere(home_case: Run) -> None:
    prepared, _, result = home_case
    page = _Page(html_report(prepared.scenario, result))
    assert not page.open and not page.links
    assert not {"script", "link", "img", "iframe", "form", "object"} & set(page.tags)
    assert f"{result.step.time_s:.3f} s" in page.text and f"{result.step.mfu_causal:.1%}" in page.text
    assert "Against what was published" in page.text and re.search(r"[+-]\d+\.\d%", page.text)
    for entry in result.provenance:
        assert entry.path in page.text and entry.source in page.text


def test_the_report_shows_markup_and_does_not_obey_it(trace_pair: Run) -> None:
    prepared, _, result = trace_pair
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    scenario = prepared.scenario.model_copy(update={"description": evil, "name": evil})
    page = _Page(html_report(scenario, result.model_copy(update={"scenario": evil, "warnings": (evil,)})))
    assert not page.links and "script" not in page.tags and "img" not in page.tags
    assert page.text.count(evil) >= 3
