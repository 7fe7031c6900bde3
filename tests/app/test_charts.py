"""Charts: what they draw is what they were given, with units on every axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

import moesim
from moesim.hwmodels.topologies.picture import picture
from moesim.simulator.engine.full_resolution.result import HeatMap
from moesim.simulator.predict.result import Result
from moesim.simulator.run.report import OutlookRow

go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")

from moesim.app.charts import differences, heat_maps, run_cost, step, style  # noqa: E402

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
    "heat": lambda: heat_maps.heat_map(HEAT),
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


def test_empty_cells_of_a_heat_map_stay_empty() -> None:
    assert heat_maps.heat_map(HEAT).data[0].z[0][1] is None


def test_the_picture_names_what_it_leaves_out() -> None:
    drawn = picture(moesim.load("deepseek-v3-2048xh800").machine.topology())
    chart = heat_maps.picture(drawn)
    names = [trace.name for trace in chart.data]
    assert "gpu: 2,048, 24 shown" in names
    assert "spine: 32" in names
    assert any(name.startswith("nvlink: 200 GB/s") for name in names)


def test_small_causes_of_a_waterfall_are_one_bar_and_the_sum_stays() -> None:
    changes = [(f"cause {n}", 0.01 * n) for n in range(20)]
    total = sum(seconds for _, seconds in changes)
    bars = differences.waterfall("A", 10.0, changes, "B", 10.0 + total, most=5).data[0]
    assert len(bars.x) == 8
    assert sum(bars.y[1:-1]) == pytest.approx(total)


def test_a_waterfall_has_no_bar_that_no_digit_shows() -> None:
    changes = [("attn F", -0.5), ("mlp F", 0.001), ("dispatch F", -0.0009), ("same", 0.0)]
    bars = differences.waterfall("A", 10.0, changes, "B", 9.5001).data[0]
    assert list(bars.x) == ["A", "attn F", "B"] and list(bars.text) == ["10.00", "-0.50", "9.50"]
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
