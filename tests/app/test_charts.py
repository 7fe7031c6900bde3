"""Charts: what they draw is what they were given, with units on every axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

import moesim
from moesim.hwmodels.topologies.base import picture
from moesim.simulator.engine.full_resolution.result import HeatMap
from moesim.simulator.predict.result import Result
from moesim.simulator.run.report import OutlookRow
from moesim.simulator.scoring.published import Row
from moesim.simulator.scoring.scoreboard.rows import kept_board

go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")

from moesim.app.charts import differences, evidence, run_cost, step, style, sweep  # noqa: E402

MEASURES = ("(s)", "(ms)", "(GiB)", "(bytes)")
UNITS = (*MEASURES, "rank", "share", "stream", "phase", "cause", "scenario", "layer", "node")


@lru_cache(maxsize=1)
def result() -> Result:
    return moesim.simulate("deepseek-v3-trace-pair")


HEAT = HeatMap(
    title="load",
    unit="share",
    row_label="node",
    column_label="rank",
    rows=("0", "1"),
    columns=("a", "b"),
    values=((0.1, None), (0.3, 0.4)),
)

CHARTS: dict[str, Callable[[], object]] = {
    "breakdown": lambda: step.breakdown(result().breakdown_by_rank_s),
    "critical path": lambda: step.critical_path(result().critical_path_s),
    "memory": lambda: step.memory(result().memory),
    "bounds": lambda: step.bounds(result().step, (1.0, 2.0)),
    "pair": lambda: step.pair_phases(result().pair_phases),
    "busy": lambda: step.busy({"NICs": 0.5}),
    "heat": lambda: step.heat_map(HEAT),
    "waterfall": lambda: differences.waterfall("A", 1.0, [("attn F", 0.2)], "B", 1.2),
    "sides": lambda: differences.side_by_side(["A", "B"], [1.0, 2.0], "step time (s)"),
    "pareto": lambda: differences.pareto([("p", 1.0, 2.0)], ("own", 1.5, 2.0), "memory (bytes)"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_every_axis_that_has_numbers_says_what_they_are(name: str) -> None:
    chart = CHARTS[name]()
    assert isinstance(chart, go.Figure)
    axes = [axis for kind in ("xaxis", "yaxis") for axis in [getattr(chart.layout, kind)]]
    titles = [axis.title.text or "" for axis in axes if axis.showticklabels is not False]
    named = [text for text in titles if text]
    assert named, name
    assert all(any(unit in text for unit in UNITS) for text in named), named


def test_the_parts_of_a_breakdown_sum_to_the_step() -> None:
    chart = step.breakdown(result().breakdown_by_rank_s)
    bars = [trace for trace in chart.data if trace.type == "bar"]
    for rank in range(len(result().breakdown_by_rank_s)):
        assert sum(bar.y[rank] for bar in bars) == pytest.approx(result().step.time_s, rel=1e-9)


def test_memory_bars_sum_to_the_total() -> None:
    total = sum(bar.x[0] for bar in step.memory(result().memory).data)
    assert total * 2**30 == pytest.approx(result().memory.total_bytes)


def test_a_kind_of_memory_has_one_colour_for_every_model() -> None:
    seen: dict[str, set[str]] = {}
    for preset in moesim.presets()[::4]:
        for bar in step.memory(moesim.check(moesim.load(preset)).memory).data:
            seen.setdefault(bar.name, set()).add(bar.marker.color)
    assert len(seen) >= 6 and all(len(colours) == 1 for colours in seen.values()), seen
    every = [colour for colours in seen.values() for colour in colours]
    assert len(set(every)) == len(every)


def test_halves_of_a_backward_and_it_whole_have_colours_of_their_own() -> None:
    assert len({step.ACTIONS[kind] for kind in ("F", "B", "I", "W")}) == 4
    assert len(set(step.ACTIONS.values())) == len(step.ACTIONS)
    assert len({colour for _, colour in style.CATEGORIES.values()}) == len(style.CATEGORIES)


def test_a_chart_of_a_roofline_is_hatched_and_says_so() -> None:
    plain, hatched = (
        style.muted(step.breakdown(result().breakdown_by_rank_s), roofline) for roofline in (False, True)
    )
    assert plain.data[0].marker.pattern.shape is None and not plain.layout.annotations
    assert hatched.data[0].marker.pattern.shape == "/"
    assert "roofline" in hatched.layout.annotations[0].text
    assert [bar.y for bar in hatched.data] == [bar.y for bar in plain.data]


def test_medians_and_coverage_draw_every_set() -> None:
    sets = kept_board().sets[:5]
    bars, points = evidence.medians(sets).data[0], evidence.coverage(sets).data[0]
    assert list(bars.x) == [score.median_absolute_error for score in reversed(sets)]
    assert list(points.x) == [score.covered for score in reversed(sets)]


def test_rows_are_named_for_people_and_no_two_alike() -> None:
    rows = [
        Row(id=id_, source="s", quantity="MFU", unit="1", published=1.0, predicted=1.0, relative_error=0.0,
            used_for_calibration=False)
        for id_ in ("a.mfu@p", "b.mfu@p", "c")
    ]  # fmt: skip
    names = evidence.readable(rows)
    assert names == {"a.mfu@p": "MFU, p", "b.mfu@p": "MFU, p (b.mfu)", "c": "MFU"}


def test_empty_cells_of_a_heat_map_stay_empty() -> None:
    assert step.heat_map(HEAT).data[0].z[0][1] is None


def test_the_picture_names_what_it_leaves_out() -> None:
    drawn = picture(moesim.load("deepseek-v3-2048xh800").machine.topology())
    chart = step.picture(drawn)
    names = [trace.name for trace in chart.data]
    assert "2,048 GPUs (24 shown)" in names
    assert "32 spine switches" in names
    assert any(name.startswith("NVLink: 200 GB/s") for name in names)


def test_small_causes_of_a_waterfall_are_one_bar_and_the_sum_stays() -> None:
    changes = [(f"cause {n}", 0.01 * n) for n in range(20)]
    total = sum(seconds for _, seconds in changes)
    bars = differences.waterfall("A", 10.0, changes, "B", 10.0 + total, most=5).data[0]
    assert len(bars.x) == 8
    assert sum(bars.y[1:-1]) == pytest.approx(total)


def test_a_waterfall_has_no_bar_that_no_digit_shows() -> None:
    changes = [("attn F", -0.5), ("mlp F", 0.001), ("dispatch F", -0.0009), ("same", 0.0)]
    bars = differences.waterfall("A", 10.0, changes, "B", 9.5001).data[0]
    assert list(bars.x) == ["A", "attention forward", "B"] and list(bars.text) == ["10.00", "-0.50", "9.50"]
    assert bars.measure[-1] == "absolute" and bars.y[-1] == 9.5001
    small = differences.waterfall("A", 0.02, [("attn F", -0.0005), ("mlp F", 0.0)], "B", 0.0195).data[0]
    assert list(small.text) == ["0.02000", "-0.00050", "0.01950"]
    assert list(differences.waterfall("A", 10.0, [("attn F", 0.0)], "B", 10.0).data[0].x) == ["A", "B"]


def test_a_difference_within_its_uncertainty_is_grey() -> None:
    changes = [("attn F", -0.5), ("mlp F", 0.2)]
    for sure in (True, False):
        bars = differences.waterfall("A", 10.0, changes, "B", 9.7, sure=sure).data[0]
        colours = {bars.increasing.marker.color, bars.decreasing.marker.color}
        assert (colours == {style.GREY}) != sure


def test_tornado_puts_the_largest_swing_on_top() -> None:
    chart = differences.tornado([("small", "", 0.9, 1.1), ("large", "", 0.5, 1.5)], 1.0)
    assert chart.data[0].y[-1] == "large"
    low, high = chart.data
    assert [low.x[-1], high.x[-1]] == pytest.approx([-0.5, 0.5])


def test_the_outlook_draws_every_point_with_its_day_and_bill() -> None:
    rows = [
        OutlookRow(share=0.1, days=50.0, finish="2027-01-20", cost_usd=5e6),
        OutlookRow(share=0.9, days=60.0, finish=None, cost_usd=None),
    ]
    chart = run_cost.outlook(rows)
    (line,) = chart.data
    assert (list(line.x), list(line.y)) == ([50.0, 60.0], [0.1, 0.9])
    assert [list(told) for told in line.customdata] == [["2027-01-20", ", $5,000,000"], ["60.0 days", ""]]
    assert "days" in chart.layout.xaxis.title.text and "chance" in chart.layout.yaxis.title.text


def test_bars_have_the_colour_of_their_evidence_and_whiskers() -> None:
    bars = (sweep.ClusterBar("x", "1", (1.0, 0.5, 2.0), "measured"),
            sweep.ClusterBar("y", "2", (2.0, 1.5, 4.0), "roofline"))  # fmt: skip
    chart = sweep.intervals(bars, "days")
    assert [trace.name for trace in chart.data] == ["measured", "roofline"]
    assert chart.data[0].marker.color != chart.data[1].marker.color
    assert list(chart.data[1].error_x.array) == [2.0] and list(chart.data[1].error_x.arrayminus) == [0.5]


def test_a_heat_map_over_numbers_stands_on_a_true_scale() -> None:
    points = [(x, y, float(x * y), "ok") for x in (32, 8, 256) for y in (4, 2, 3)]
    chart = sweep.grid(("communication.sms", "parallel.pp"), "step time (s)", points, (8, 4))
    cells, star = chart.data
    assert list(cells.x) == [8, 32, 256] and chart.layout.xaxis.type == "log"
    assert list(cells.y) == [2, 3, 4] and chart.layout.yaxis.type == "linear"
    assert cells.z[2][0] == 32.0 and list(star.x) == [8] and list(star.y) == [4]
    named = sweep.grid(
        ("schedule", "parallel.pp"), "s", [("1f1b", 2, 1.0, "ok"), ("gpipe", 2, 2.0, "ok")], None
    )
    assert named.layout.xaxis.type == "category" and list(named.data[0].x) == ["1f1b", "gpipe"]
    assert named.layout.yaxis.type == "category", "one value needs no scale"
