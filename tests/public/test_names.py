"""The names of `moesim`: all are listed before they are loaded, and copies of a scenario are told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import moesim
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.common.texts import parse_values
from moesim.simulator.scenario import Scenario

LISTED = """
import sys, moesim
print(sorted(set(moesim.__all__) - set(dir(moesim))), "numpy" in sys.modules, "pydantic" in sys.modules)
"""


def test_every_public_name_is_listed_before_it_is_loaded() -> None:
    listed = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["[]", "False", "False"], "dir() must neither miss a name nor load one"


def test_compare_tells_copies_of_a_scenario_apart(small: Scenario) -> None:
    few = small.replace(**{"communication.sms": 8})
    many = few.replace(seed=3, schedule="1f1b", recompute="full")
    names = [side.name for side in moesim.compare([small, few, many]).sides]
    assert names[:2] == [small.name, f"{small.name}, communication.sms=8"]
    assert names[2].startswith(f"{small.name}, ") and names[2].endswith("more keys")
    assert len(set(names)) == 3


def test_a_stated_name_stays_as_written(small: Scenario) -> None:
    other = small.replace(name="few", **{"communication.sms": 8})
    assert [side.name for side in moesim.compare([small, other]).sides] == [small.name, "few"]
    named = moesim.compare([small, small.replace(seed=1)], names=["a", None])
    assert [side.name for side in named.sides] == ["a", f"{small.name}, seed=1"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[8, 16]", (8, 16)),
        ("[8,16..32:8]", (8, 16, 24, 32)),
        ("[bf16, fp8]", ("bf16", "fp8")),
        ("[[8, 16]]", ([8, 16],)),
        ("[[1, 2], [2, 1]]", ([1, 2], [2, 1])),
        ("[1, 2], [2, 1]", ([1, 2], [2, 1])),
        ("[7]", (7,)),
    ],
)
def test_a_list_in_brackets_is_the_list_of_values(text: str, values: tuple[object, ...]) -> None:
    assert parse_values(text, "key") == values


def test_a_sweep_takes_a_list_in_brackets(small: Scenario) -> None:
    swept = moesim.sweep(small, {"communication.sms": "[8, 16]"}, workers=1)
    assert [point.values["communication.sms"] for point in swept.points] == [8, 16]
    assert [point.status for point in swept.points] == ["ok", "ok"]


MOST_LINES = 15
MOST_LETTERS = 1500
FIVE_LINES = Path(__file__).parents[2] / "examples" / "five-lines.yaml"
FLEET = Path(__file__).parents[2] / "examples" / "mixed.yaml"


def check_short(thing: object, *words: str) -> str:
    text = repr(thing)
    assert str(thing) == text, "print and the prompt show the same"
    assert 1 <= len(text.splitlines()) <= MOST_LINES
    assert len(text) < MOST_LETTERS
    for word in words:
        assert word in text
    return text


@pytest.fixture(scope="module")
def result(small: Scenario) -> moesim.Result:
    return moesim.simulate(small, uncertainty=True)


def test_a_result_prints_its_headline_figures(result: moesim.Result) -> None:
    step, memory = result.step, result.memory
    text = check_short(
        result,
        result.scenario,
        f"{step.time_s:.3f} s, between the bounds {step.lower_bound_s:.3f} s and {step.upper_bound_s:.3f} s",
        f"P90 {result.uncertainty.bands['step_time_s'].p90:.3f} s" if result.uncertainty else "",
        f"{100 * step.mfu_causal:.1f} % causal",
        f"{memory.total_bytes / 2**30:.1f} of {memory.capacity_bytes / 2**30:.1f} GiB",
        str(result.run),
    )
    assert f"profile {result.profile}, confidence {result.confidence}" in text.splitlines()[0]


def test_a_result_that_does_not_fit_says_so(result: moesim.Result) -> None:
    memory = result.memory
    for verdict, size in (
        ("fits", memory.range_bytes[1]),
        ("at risk", memory.total_bytes),
        ("does not fit", 0.9 * memory.total_bytes),
    ):
        other = result.model_copy(update={"memory": memory.model_copy(update={"capacity_bytes": size})})
        assert f"GiB on the fullest GPU: {verdict}, " in repr(other)


def test_a_run_prints_days_hours_and_cost(result: moesim.Result, small: Scenario) -> None:
    run = result.run
    text = check_short(run, f"{run.days:.1f} days", "GPU-hours", "tokens in", "$")
    assert len(text.splitlines()) == 1
    report = moesim.run(small, step_time_s=result.step.time_s)
    check_short(report, f"{report.days.predicted:.1f}", "GPU-hours", "$", "goodput")
    both = run.model_copy(update={"report": report})
    assert f"with interruptions {report.days.predicted:.1f} days" in repr(both)


def test_studies_print_their_first_rows(small: Scenario) -> None:
    few = small.replace(**{"communication.sms": 8})
    comparison = moesim.compare([small, few])
    change = comparison.sides[1].figures["step_time_s"] or 0.0
    first = comparison.sides[0].figures["step_time_s"] or 0.0
    check_short(comparison, f"{change - first:+.3f}", "communication.sms=8", "critical path, seconds")
    swept = moesim.sweep(small, {"communication.sms": [8, 12, 16, 20, 24, 28, 32, 36]}, workers=1)
    best = swept.best()
    lines = repr(swept).splitlines()
    # Title, what it is of, fastest, title of the table, a row for each of the 8 points, where to find more.
    assert len(lines) == 1 + len(swept.inputs.lines()) + 1 + 1 + 8 + 1
    assert "8 points (8 ok)" in lines[0] and "more: .rows()" in lines[-1]
    assert f"fastest: communication.sms={best.values['communication.sms']}" in repr(swept)
    many = swept.model_copy(update={"points": swept.points * 6})
    assert len(repr(many).splitlines()) == len(lines) + 40 - 8 + 1 and "... and 8 more" in repr(many)
    check_short(moesim.sensitivity(small), "model.left_out", "rows")


def test_a_plan_search_prints_its_best_plans() -> None:
    space = moesim.PlanSpace(
        pp="1,2", tp="1", cp="1", vpp="1", ep="8", schedule=("1f1b", "zb-h1"), microbatch="1", zero_stage="1",
        recompute=("full", "selective"),
    )  # fmt: skip
    found = moesim.plan(str(FIVE_LINES), space)
    text = check_short(found, found.best.label, f"{found.best.time_s:.3f}", "considered", "simulated")
    assert "rank None" not in text
    assert len(check_short(found.best, found.best.label, "GiB", "days").splitlines()) == 1
    assert f"<td>{found.best.label}</td>" in found._repr_html_()


def test_scenarios_print_model_machines_and_plan_without_loading(small: Scenario, tmp_path: Path) -> None:
    check_short(small, small.name, small.schedule, f"pp={small.parallel.pp}")
    check_short(moesim.load("deepseek-v3-2048xh800"), "deepseek-h800-2048", "h800-trace", "20 SMs")
    check_short(moesim.load(str(FLEET)), "fleet of")
    file = tmp_path / "model.yaml"
    file.write_text(dump_mapping(small.shape.model_dump(mode="json", exclude_none=True)))
    absent = small.replace(model=str(file))
    file.unlink()
    assert "model.yaml" in repr(absent), "printing must not read the files that a scenario names"
