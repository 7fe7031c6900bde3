"""The packed step: what the browser's own script reads is what the simulator computed."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_scripts import needs_node, run

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.step_events import StepEvents, step_events
from moesim.simulator.predict.trace import SCHEDULE

pytest.importorskip("plotly", reason="plotly is not installed")

from moesim.app.charts import step as timeline_kinds
from moesim.app.components.timeline import packing

SMALL = ("deepseek-v3-2048xh800", "cluster.nodes=64", "batch.sequences=1024", "parallel.ep=32")

READ = """
import fs from "node:fs";
import { decode } from "./decode.js";
const plain = (value) => ArrayBuffer.isView(value) ? Array.from(value)
  : Array.isArray(value) ? value.map(plain)
  : value && typeof value === "object"
    ? Object.fromEntries(Object.entries(value).map(([key, one]) => [key, plain(one)]))
  : value;
console.log(JSON.stringify(plain(decode(new Uint8Array(fs.readFileSync(process.argv[2]))))));
"""


@lru_cache(maxsize=1)
def step() -> StepEvents:
    return step_events(moesim.load(*SMALL))


def read(folder: Path, data: bytes) -> Any:
    (folder / "step.bin").write_bytes(data)
    return run(folder, READ, "step.bin")


@needs_node
def test_the_browsers_script_reads_back_every_event_action_and_the_path(tmp_path: Path) -> None:
    found, events = read(tmp_path, packing.packed_step(step()).data), step().events
    assert found["endMs"] == step().end_ns / 1e6
    assert found["ranks"] == step().ranks and found["whole"] is True

    def joined(column: str) -> list[Any]:
        return [value for row in found["rows"] for value in row[column]]

    assert joined("begin") == (events.begin_ns / 1e6).tolist()
    assert joined("end") == (events.end_ns / 1e6).tolist()
    names = [entry["name"] for entry in found["names"]]
    assert [names[n] for n in joined("name")] == [events.names[n] for n in events.name.tolist()]
    assert joined("action") == events.action.tolist()
    assert joined("block") == events.block.tolist()
    assert joined("critical") == events.critical.astype(int).tolist()
    places = [(row["rank"], row["stream"]) for row in found["rows"] for _ in row["begin"]]
    assert places == list(zip(events.rank.tolist(), events.stream.tolist(), strict=True))
    # Actions and the critical path too.
    actions, path, read_actions = step().actions, step().path, found["actions"]
    names = [entry["name"] for entry in found["names"]]
    assert [names[n] for n in read_actions["kind"]] == list(actions.kind)
    assert read_actions["rank"] == actions.rank.tolist()
    assert read_actions["stages"] == actions.stages.T.tolist()
    assert read_actions["microbatches"] == actions.microbatches.T.tolist()
    for key, column in (("begin", actions.start_ns), ("end", actions.end_ns)):
        assert read_actions[key] == (column / 1e6).tolist()
    for key, column in (("hidden", actions.hidden_ns), ("exposed", actions.exposed_ns)):
        assert read_actions[key] == (column / 1e6).tolist()
    assert read_actions["critical"] == actions.critical.astype(int).tolist()
    assert found["path"]["begin"] == (path.begin_ns / 1e6).tolist()
    assert found["path"]["end"] == (path.end_ns / 1e6).tolist()
    assert [names[n] for n in found["path"]["name"]] == list(path.cause)
    assert found["path"]["ranks"] == path.rank.tolist()
    assert found["path"]["action"] == path.action.tolist()


def by_hand(data: bytes, count: int) -> list[int]:
    """Read a column as the module's docstring says."""
    found, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            found.append(value)
            value = shift = 0
    assert len(found) == count and shift == 0
    return found


@given(st.lists(st.integers(0, 2**53 - 1)))
def test_any_column_can_be_read_as_it_is_described(values: list[int]) -> None:
    assert by_hand(packing.numbers(np.array(values, dtype=np.int64)), len(values)) == values


@given(st.lists(st.integers(-(2**52), 2**52 - 1)))
def test_folding_loses_nothing_and_gives_no_negative_number(values: list[int]) -> None:
    folded = packing.folded(np.array(values, dtype=np.int64)).tolist()
    assert all(value >= 0 for value in folded)
    assert [-(value + 1) // 2 if value % 2 else value // 2 for value in folded] == values


EDGES = [0, 1, 127, 128, 16383, 16384, 2**28 - 1, 2**28, 2**31, 2**32 - 1, 2**32, 2**52, 2**53 - 1]


@needs_node
def test_the_browsers_script_reads_numbers_of_every_size(tmp_path: Path) -> None:
    data = packing.numbers(np.array(EDGES, dtype=np.int64))
    script = f"""
import {{ numbers, unfolded }} from "./decode.js";
const bytes = Uint8Array.from({json.dumps(list(data))});
const folded = {packing.folded(np.array([0, -1, 1, -(2**40), 2**40])).tolist()};
console.log(JSON.stringify([Array.from(numbers(bytes, 0, {len(EDGES)})), folded.map(unfolded)]));
"""
    assert run(tmp_path, script) == [EDGES, [0, -1, 1, -(2**40), 2**40]]


def test_a_step_of_too_many_events_has_all_actions_and_the_phases_of_one_rank() -> None:
    whole = packing.packed_step(step())
    rank = packing.packed_step(step(), rank=3, most=whole.events - 1)
    header = json.loads(rank.data[4 : 4 + int.from_bytes(rank.data[:4], "little")])
    assert whole.whole and not rank.whole and rank.events < whole.events
    assert {row["rank"] for row in header["rows"] if row["stream"] != SCHEDULE} == {3}
    assert sum(row["count"] for row in header["rows"] if row["stream"] == SCHEDULE) > len(step().actions.kind)
    least = packing.packed_step(step(), rank=3, most=rank.events - 100)
    assert least.events == rank.events - 100
    assert step().actions.rank[least.opened] == 3


def test_more_actions_than_a_browser_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_ACTIONS", 10)
    with pytest.raises(InputError, match=r"schedule actions, and a timeline shows up to 10"):
        packing.packed_step(step())


def test_a_message_stays_small() -> None:
    packed = packing.packed_step(step())
    assert len(packed.data) < 12 * packed.events + 20_000


def test_no_kind_of_event_has_the_colour_of_another() -> None:
    """All stand together in "Every event"; only a wait is named by a cause of the path too."""
    shown = [*timeline_kinds.ACTIONS.values(), *timeline_kinds.PHASES.values()]
    same = len(shown) - len(set(shown))
    assert same == 2, "notify is a wait, and a pipeline send may carry an activation"
    of_step = {timeline_kinds.colour(kind) for kind in step().events.names}
    waits = sum(kind.startswith(("wait for", "prepare")) for kind in step().events.names)
    assert len(of_step) >= len(step().events.names) - waits + 1


def test_a_timeline_speaks_the_words_of_the_field() -> None:
    data = packing.packed_step(step()).data
    header = json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
    words = {entry["name"]: entry["words"] for entry in header["names"]}
    assert words["F"] == "forward" and words["F&B"] == "F&B pair"
    assert not any("OVERLAP" in text or "nccl" in text for text in words.values())
