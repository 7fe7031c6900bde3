"""The names of `moesim`: all are listed before they are loaded, and copies of a scenario are told apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moesim
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
