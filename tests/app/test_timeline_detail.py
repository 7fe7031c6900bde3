"""What each pixel of a timeline shows, what a search finds, and how times are written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from timeline_scripts import needs_node, run

pytestmark = needs_node

PIXELS = """
import fs from "node:fs";
import { pixelRow, pixels } from "./detail_level.js";
const cases = JSON.parse(fs.readFileSync("cases.json", "utf8"));
console.log(JSON.stringify(cases.map(({ events, from, to, width, kinds, lit }) => {
  const row = {
    count: events.length,
    begin: Float64Array.from(events, (e) => e[0]),
    end: Float64Array.from(events, (e) => e[1]),
    name: Uint16Array.from(events, (e) => e[2]),
  };
  const out = pixelRow(width, kinds);
  pixels(row, from, to, width, lit && Uint8Array.from(lit), out);
  return [Array.from(out.kind), Array.from(out.share), Array.from(out.lit)];
})));
"""

KINDS = 4


def random_case(seed: int) -> dict[str, Any]:
    """Events of very different lengths, with and without gaps, and a window anywhere over them."""
    chance = random.Random(seed)
    time, events = 0.0, []
    for _ in range(chance.choice((0, 1, 5, 60, 400))):
        time += chance.choice((0.0, 0.0, 0.01, 0.3, 5.0)) * chance.random()
        length = chance.choice((0.001, 0.02, 0.5, 4.0, 40.0)) * chance.random() + 1e-6
        events.append((time, time + length, chance.randrange(KINDS)))
        time += length
    a, b = sorted(chance.uniform(-1.0, time + 1.0) for _ in range(2))
    lit = [chance.randrange(2) for _ in events] if chance.random() < 0.5 else None
    width = chance.choice((1, 7, 50))
    return {"events": events, "from": a, "to": b + 1e-3, "width": width, "kinds": KINDS, "lit": lit}


def times_in_pixel(case: dict[str, Any], pixel: int) -> tuple[list[float], float]:
    """(time of each kind in a pixel, time of lit events), in parts of the pixel."""
    each = (case["to"] - case["from"]) / case["width"]
    begin, end = case["from"] + pixel * each, case["from"] + (pixel + 1) * each
    times, lit = [0.0] * KINDS, 0.0
    for number, (a, b, kind) in enumerate(case["events"]):
        time = max(0.0, min(b, end) - max(a, begin)) / each
        times[kind] += time
        lit += time * (1 if case["lit"] is None else case["lit"][number])
    return times, lit


def test_every_pixel_shows_the_kind_that_fills_most_of_it(tmp_path: Path) -> None:
    cases = [random_case(seed) for seed in range(300)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    shown = 0
    for case, (kind, share, lit) in zip(cases, run(tmp_path, PIXELS), strict=True):
        for pixel in range(case["width"]):
            times, bright = times_in_pixel(case, pixel)
            busy = sum(times)
            assert share[pixel] == pytest.approx(min(1.0, busy), abs=1e-5)
            if busy < 1e-6:
                continue
            shown += 1
            assert times[kind[pixel]] >= max(times) - 1e-6
            assert lit[pixel] == pytest.approx(bright / busy, abs=1e-4)
    assert shown > 1000


def test_nothing_that_is_longer_than_a_pixel_vanishes(tmp_path: Path) -> None:
    cases = [random_case(seed) for seed in range(300, 500)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    long = 0
    for case, (kind, share, _) in zip(cases, run(tmp_path, PIXELS), strict=True):
        each = (case["to"] - case["from"]) / case["width"]
        for begin, end, own in case["events"]:
            a, b = max(begin, case["from"]), min(end, case["to"])
            if b - a <= 2 * each:  # it covers at least one pixel alone
                continue
            long += 1
            first, last = (int((t - case["from"]) / each) for t in (a, b - 1e-9))
            inside = range(first + 1, min(last, case["width"]))
            assert all(kind[p] == own and share[p] == 1.0 for p in inside)
        for pixel in range(case["width"]):
            assert (kind[pixel] >= 0) == (share[pixel] > 0)
    assert long > 100


TEXTS = """
import { durationText, tickText, ticks, timeText } from "./time_axis.js";
const spans = [0.00004, 0.37, 18.9, 18908.7, 4e6];
console.log(JSON.stringify({
  durations: [148.634, 0.045924, 1234.56, 0.000012, 3.75819].map(durationText),
  times: [2250.0, 0.0459].map(timeText),
  axes: spans.map((span) => {
    const { step, ticks: found } = ticks(span, 2 * span, 1000, 120);
    return found.map((time) => tickText(time, step));
  }),
}));
"""


def test_times_are_milliseconds_with_four_digits_and_ticks_can_be_told_apart(tmp_path: Path) -> None:
    found = run(tmp_path, TEXTS)
    assert found["durations"] == ["148.6 ms", "0.04592 ms", "1,235 ms", "0.000012 ms", "3.758 ms"]
    assert found["times"] == ["2,250.000 ms", "0.046 ms"]
    for texts in found["axes"]:
        assert 3 <= len(texts) <= 9
        assert len(set(texts)) == len(texts) and all(text.endswith(" ms") for text in texts)


SEARCH = """
import { search } from "./search.js";
const names = ["F", "F&B", "dispatch F", "wait for dispatch F", "attn I"].map((name) => ({
  name, words: name === "F" ? "forward" : name === "F&B" ? "F&B pair" : name,
}));
const actions = { count: 2, kind: [0, 1], stages: [[3, 3], [-1, 12]], microbatches: [[7, 8], [-1, 7]] };
const row = (rank, stream, events) => ({
  rank, stream, count: events.length, begin: events.map((e) => e[0]), end: events.map((e) => e[1]),
  name: events.map((e) => e[2]), action: events.map((e) => e[3]),
});
const schedule = row(0, 0, [[0, 10, 0, 0], [10, 30, 1, 1]]);
const communication = row(0, 2, [[1, 2, 3, 0], [2, 4, 2, 0], [12, 13, 3, 1], [13, 16, 2, 1]]);
const compute = row(0, 1, [[20, 25, 4, 1]]), exposed = row(0, 7, [[1, 4, 2, 0]]);
const step = { names, actions };
const asked = process.argv.slice(2).map((text) => {
  const { masks, found } = search(step, [schedule, communication, compute, exposed], text);
  const begins = found.map(({ row, index }) => row.begin[index]);
  return { found: begins, lit: Array.from(masks.get(schedule) ?? []) };
});
console.log(JSON.stringify(asked));
"""


@pytest.mark.parametrize(
    ("text", "begins", "lit"),
    [
        ("dispatch f", [1, 2, 12, 13], [1, 1]),
        ('"dispatch F"', [2, 13], [1, 1]),
        ("dispatch F mb 8", [12, 13], [0, 1]),
        ("attn micro-batch 7", [20], [0, 1]),  # the backward side of the pair
        ("attn mb7 stage 3", [], [0, 0]),  # micro-batch and stage of one side together
        ("s12", [10, 20], [0, 1]),
        ("pair", [10], [0, 1]),
        ("7", [0, 1, 2, 10, 20], [1, 1]),
        ("forward rank 1", [], [0, 0]),
        ("exposed", [1], [1, 0]),  # the row that is made of others counts where it is asked for
        ("exposed dispatch rank 1", [], [0, 0]),
        ("   ", [], []),
    ],
)
def test_a_search_finds_by_name_stage_and_micro_batch(
    text: str, begins: list[float], lit: list[int], tmp_path: Path
) -> None:
    assert run(tmp_path, SEARCH, text) == [{"found": begins, "lit": lit}]


TABLES = SEARCH.replace(
    'import { search } from "./search.js";', 'import { exposedEvents, totals } from "./tables.js";'
)
TABLES = (
    TABLES[: TABLES.index("const step =")]
    + """
const other = row(1, 7, [[5, 6, 2, -1], [7, 12, 3, 1]]);
const step = { names, actions: { ...actions, exposed: [4, 2] }, whole: process.argv[2] === "whole",
  rows: [schedule, communication, exposed, other] };
const half = new Uint8Array([0, 1, 1, 0]);
console.log(JSON.stringify({
  ranked: exposedEvents(step).map(({ row, index, ms }) => [row.rank, row.begin[index], ms]),
  totals: totals(step, [communication], 2, 12, () => null),
  lit: totals(step, [communication], 0, 99, () => half).map(({ words, total }) => [words, total]),
}));
"""
)


def test_exposed_communication_is_ranked_over_all_ranks_and_kinds_are_summed(tmp_path: Path) -> None:
    found = run(tmp_path, TABLES, "whole")
    assert found["ranked"] == [[1, 7, 5], [0, 1, 3], [1, 5, 1]]
    assert found["totals"] == [
        {"words": "dispatch F", "count": 1, "total": 2, "least": 2, "most": 2, "mean": 2},
        {"words": "wait for dispatch F", "count": 1, "total": 1, "least": 1, "most": 1, "mean": 1},
    ]
    assert found["lit"] == [["dispatch F", 2], ["wait for dispatch F", 1]]
    part = run(tmp_path, TABLES, "a part")  # then the actions of all ranks, by what each exposes
    assert part["ranked"] == [[0, 0, 4], [0, 10, 2]]
