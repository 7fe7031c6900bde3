"""The page Trace in a simulated session, and the jobs behind it."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import JOB, metrics, session, table, until, words
from streamlit.proto.Common_pb2 import FileURLs
from streamlit.runtime.uploaded_file_manager import UploadedFile, UploadedFileRec
from streamlit.testing import v1 as testing
from trace_files import launched, step, write

from moesim.app import trace_jobs, upload_files
from moesim.app.components.timeline import packing
from moesim.app.trace_jobs import TraceRequest
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import READ_BELOW
from moesim.simulator.trace import StepTrace, read
from moesim.simulator.trace.partition import StepSide, side_of

HOSTILE = "<img src=x onerror=alert(1)> [a](javascript:b) $x$"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(READ_BELOW, str(tmp_path))
    return tmp_path


def quiet(share: float | None, text: str) -> None:
    """Progress that nobody looks at."""


def kept(*files: tuple[str, bytes]) -> str:
    records = [UploadedFileRec(name, name, "", data) for name, data in files]
    return upload_files.keep_trace([UploadedFile(record, FileURLs()) for record in records], "one")


def trace_bytes(tmp_path: Path, rank: int = 0, more: float = 0.0, kernel: str = "nvjet_tst_d") -> bytes:
    events = [*step(), *launched(kernel, 100, 110, 5 + more, 5)]
    return write(tmp_path / "made.json", events, rank).read_bytes()


# -- jobs ----------------------------------------------------------------------------------------------


def test_files_are_deleted_once_they_are_read_and_every_view_needs_only_what_was_read(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tmp_path_factory.mktemp("made")
    one, two = (kept(("a.json", trace_bytes(made, more=more))) for more in (0.0, 30.0))
    for token in (one, two):
        reading = trace_jobs.read_trace(str(folder), token, quiet)
        assert [path.name for path in (folder / token).iterdir()] == [trace_jobs.READ]
        assert reading.source == "a.json" and len(reading.ranks) == 1
    alone = trace_jobs.view(TraceRequest(str(folder), one))
    assert alone.comparison is None and (alone.rank, alone.step) == (0, "ProfilerStep#3")
    asked = TraceRequest(str(folder), two, other=one)
    both = trace_jobs.view(asked)
    assert both.comparison is not None
    bars = both.comparison["bars"]
    assert sum(row["difference_ns"] for row in bars) == both.comparison["gap_ns"] == 30_000
    files = {kind: trace_jobs.download(asked, kind) for kind in ("json", "csv", "html", "perfetto")}
    assert json.loads(files["json"])["gap_ns"] == 30_000 and b"step,wall" in files["csv"]
    assert b"default-src 'none'" in files["html"]
    processes = {event["pid"] for event in json.loads(gzip.decompress(files["perfetto"]))["traceEvents"]}
    assert processes == {1, 2}
    assert json.loads(trace_jobs.download(TraceRequest(str(folder), one), "json"))["source"] == "a.json"


def test_ranks_of_one_folder_are_read_together(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tmp_path_factory.mktemp("made")
    token = kept(*((f"rank{rank}.json", trace_bytes(made, rank)) for rank in (0, 1)))
    said: list[float | None] = []
    reading = trace_jobs.read_trace(str(folder), token, lambda share, text: said.append(share))
    assert [rank["rank"] for rank in reading.ranks] == [0, 1] and reading.source == "2 ranks"
    assert [row[:3] for row in reading.matched] == [("all_reduce", 0, 1), ("all_reduce", 1, 1)]
    assert said[0] == 0.0 and 0.5 in said
    assert trace_jobs.view(TraceRequest(str(folder), token, rank=1)).rank == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.json",
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}',
            "CPU only",
        ),
        ("a.csv", b"hello", "."),
        ("a.json.gz", b"\x1f\x8bnothing", "cannot be read"),
        ("a.sqlite", b"SQLite format 3\0" + bytes(100), "."),
        ("a.json", b"", "the file is empty"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_paragraph_and_deleted(
    name: str, data: bytes, message: str, folder: Path
) -> None:
    token = kept((name, data))
    with pytest.raises(InputError, match=message) as refused:
        trace_jobs.read_trace(str(folder), token, quiet)
    assert str(folder) not in str(refused.value) and "\n" not in str(refused.value)
    assert list(folder.iterdir()) == []
    with pytest.raises(InputError, match="upload it again"):
        trace_jobs.view(TraceRequest(str(folder), token))


def test_a_cut_file_is_read_as_far_as_it_goes_with_its_break_in_the_notes(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = trace_bytes(tmp_path_factory.mktemp("made"))
    reading = trace_jobs.read_trace(str(folder), kept(("a.json", whole[: int(0.95 * len(whole))])), quiet)
    assert any("byte" in note for note in reading.notes)


# -- the time lines ------------------------------------------------------------------------------------


def packed(side: StepSide, most: int = packing.MOST_EVENTS) -> tuple[dict[str, Any], packing.PackedStep]:
    found = packing.packed_sides({"measured": side, "other": side}, most)
    length = int.from_bytes(found.data[:4], "little")
    return json.loads(found.data[4 : 4 + length]), found


def read_side(tmp_path: Path, events: list[dict[str, Any]]) -> tuple[StepTrace, StepSide]:
    trace = read(write(tmp_path / "made.json", events))
    return trace, side_of(trace, None, None, [])


def test_both_steps_stand_below_each_other_with_rows_by_stream(tmp_path: Path) -> None:
    header, found = packed(read_side(tmp_path, step())[1])
    assert header["sides"] == ["measured", "other"]
    assert [(row["rank"], row["title"], row["count"]) for row in header["rows"]] == [
        (0, "stream 7", 3), (0, "stream 9", 1), (1, "stream 7", 3), (1, "stream 9", 1),
    ]  # fmt: skip
    assert header["end_ns"] == 80_000 and (found.whole, found.opened) == (True, -1)
    by_name = {row["words"]: row for row in header["names"]}
    assert by_name["nvjet_tst_a"]["name"] == "gemm"
    assert by_name["nvjet_tst_a"]["colour"] != by_name["ncclDevKernel_AllReduce_Sum_bf16"]["colour"]


def test_events_that_overlap_on_a_stream_get_a_further_row_and_the_longest_are_kept(tmp_path: Path) -> None:
    events = [*step(), *launched("nvjet_tst_d", 52, 65, 12, 5)]
    side = read_side(tmp_path, events)[1]
    rows = [(row["title"], row["count"]) for row in packed(side)[0]["rows"][:3]]
    assert rows == [("stream 7", 3), ("stream 7, lane 2", 1), ("stream 9", 1)]
    header, found = packed(side, most=8)
    assert not found.whole and sum(row["count"] for row in header["rows"]) == found.events == 8
    assert {row["title"] for row in header["rows"]} == {"stream 7", "stream 9"}, "the shortest are left out"


def test_names_beyond_the_limit_are_the_rest_of_their_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MOST_NAMES", 2)
    words = {row["words"] for row in packed(read_side(tmp_path, step())[1])[0]["names"]}
    assert "other kernels" in words and len(words) == 3


def test_lanes_never_overlap() -> None:
    rng = np.random.default_rng(1)
    begin = rng.integers(0, 1000, 200)
    end = begin + rng.integers(1, 60, 200)
    lanes = packing._lanes(begin, end)
    for lane in range(int(lanes.max()) + 1):
        own = np.flatnonzero(lanes == lane)
        own = own[np.argsort(begin[own])]
        assert (end[own][:-1] <= begin[own][1:]).all()


# -- the page ------------------------------------------------------------------------------------------


def given(app: testing.AppTest, *files: tuple[str, bytes], place: str = "own") -> testing.AppTest:
    """Upload the files and press the button that reads them."""
    uploader = next(one for one in app.file_uploader if str(one.key).startswith(f"trace {place} upload"))
    uploader.set_value([(name, data, "application/json") for name, data in files]).run()
    app.button(key=f"read {place}").click().run()
    return app


def test_the_page_opens_with_an_uploader_and_no_job() -> None:
    app = session("trace")
    assert [one.proto.max_upload_size_mb for one in app.file_uploader] == [upload_files.MOST_FILE_MB]
    assert app.selectbox(key="trace beside").value == "nothing", "nobody asked for the home case"
    assert not app.error and not app.header


def test_a_link_with_a_trace_that_is_gone_says_so() -> None:
    app = session("trace", fields=[f'trace.own="trace-{"0" * 32}"'])
    assert "upload it again" in app.info[0].value and not app.header


def test_a_file_of_another_ending_is_refused_in_one_sentence() -> None:
    app = given(session("trace"), (f"{HOSTILE}.tar", b"x"))
    (error,) = app.error
    assert "ends in .json" in error.value and "<img" not in error.value


@pytest.mark.long
def test_a_trace_is_read_alone_then_beside_a_prediction_then_beside_another(tmp_path: Path) -> None:
    app = given(session("trace", *JOB), ("rank0.json", trace_bytes(tmp_path, kernel=HOSTILE)))
    until(app, lambda one: "Step" in metrics(one))
    assert metrics(app)["Step"] == "0.10 ms" and app.selectbox(key="trace beside").value == "the prediction"
    until(app, lambda one: any("sum of the bars" in text.value for text in one.markdown))
    said = words(app)
    assert "Plan" in said or "Cause" in said
    assert "<img" not in said.replace("\\<img", ""), "names of kernels are shown literally"
    assert "all_reduce" in list(table(app, "communication")["communication"])
    app.selectbox(key="trace beside").select("nothing").run()
    until(app, lambda one: not any("sum of the bars" in text.value for text in one.markdown))
    app.selectbox(key="trace beside").select("another trace").run()
    given(app, ("rank0.json", trace_bytes(tmp_path, more=30.0)), place="other")
    until(app, lambda one: any("sum of the bars" in text.value for text in one.markdown))
    assert "-0.03 ms" in words(app)


@pytest.mark.long
def test_a_refused_trace_leaves_the_page_as_it_opens() -> None:
    app = given(session("trace"), ("a.json", b'{"traceEvents": []}'))
    end = time.monotonic() + 180
    while not app.error:
        assert time.monotonic() < end
        app.run()
    assert len(app.error) == 1 and app.file_uploader and not app.header
    app.run()
    assert not app.error and not app.info


@pytest.mark.long
def test_a_scenario_that_cannot_be_predicted_leaves_the_reading(tmp_path: Path) -> None:
    app = session("trace", *JOB, "parallel.ep=7")
    given(app, ("rank0.json", trace_bytes(tmp_path)))
    end = time.monotonic() + 180
    while "Step" not in metrics(app):
        assert time.monotonic() < end
        app.run()
    assert "No comparison" in app.error[0].value
