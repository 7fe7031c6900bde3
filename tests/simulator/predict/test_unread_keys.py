"""Every key of a scenario is read by the simulator, or named as one that no prediction reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from moesim.hwmodels.provenance import sourced_numbers
from moesim.simulator.predict.plan_checks import UNREAD_FIGURES
from moesim.simulator.predict.step import run_step
from moesim.simulator.predict.summarise import summarise
from moesim.simulator.scenario import Scenario

ROOT = Path(__file__).resolve().parents[3]
NO_READER = {"importers", "faster_links.py"}
"""Modules that write keys of a cluster and predict nothing."""
DESCRIPTIONS = {"Conditions.compute_sms", "Conditions.driver", "Conditions.clocks"}
"""Keys for people: how an entry was measured."""


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


def reachable(model: type[BaseModel]) -> set[type[BaseModel]]:
    """The models of a scenario's keys."""
    found, left = set(), [model]
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [below for field in one.model_fields.values() for below in models(field.annotation)]
    return found


def read_attributes() -> set[str]:
    """Attributes that code of the simulator and of hwmodels reads."""
    return {
        node.attr
        for folder in ("simulator", "hwmodels")
        for path in (ROOT / folder).rglob("*.py")
        if not NO_READER & set(path.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_key_of_a_scenario_is_read_or_named() -> None:
    read, found = read_attributes(), reachable(Scenario)
    assert len(found) > 100
    named = {key.rpartition(".")[2] for key in UNREAD_FIGURES}
    unread = {
        f"{model.__name__}.{name}"
        for model in found
        for name in model.model_fields
        if name not in read | named
    }
    assert unread == DESCRIPTIONS


def figures(scenario: Scenario) -> dict[str, float]:
    step = summarise(run_step(scenario)).model_dump()
    return {key: step[key] for key in ("step", "memory", "utilisation", "run")}


@pytest.mark.parametrize("accelerator", ["h800-sxm", "mi300x"])
def test_a_figure_that_no_prediction_reads_changes_nothing_and_says_so(accelerator: str) -> None:
    plan = Scenario.model_validate(
        {
            "model": "olmoe-1b-7b",
            "cluster": {"accelerator": accelerator, "nodes": 2},
            "parallel": {"ep": 8, "zero_stage": 1},
            "batch": {"sequences": 16, "sequence_length": 2048},
        }
    )
    told = {
        path: figure
        for path, figure in sourced_numbers(plan.machine)
        if any(path == key or path.startswith(f"{key}.") for key in UNREAD_FIGURES)
    }
    assert "node.nic_bandwidth_effective" in told
    units = {"bytes_per_s": "GB/s", "bytes": "MB", "flop_per_s": "TFLOP/s", "hz": "MHz"}
    overrides = [f"cluster.{path}=1 {units[figure.dimension]}" for path, figure in told.items()]
    changed = plan.overridden(*overrides)
    assert figures(changed) == figures(plan)
    warnings = summarise(run_step(changed)).warnings
    for path in told:
        assert any(text.startswith(f"cluster.{path} is set and no prediction reads it") for text in warnings)
    assert not any("no prediction reads" in text for text in summarise(run_step(plan)).warnings)
