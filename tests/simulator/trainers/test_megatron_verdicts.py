"""The exports of today are those that Megatron-LM's parser judged (lab/docs/proof/megatron-verdicts.json)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from draw_plans import MODELS
from judge_plans import CONTROLS, VERDICTS, digest, plans

from moesim.simulator.trainers.trainer import description

VERSIONS = description("megatron").versions


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    verdicts: dict[str, Any] = json.loads(VERDICTS.read_text("utf-8"))
    return verdicts


@pytest.mark.parametrize("version", VERSIONS)
def test_every_plan_was_accepted(judged: dict[str, Any], version: str) -> None:
    verdicts = judged[version]["verdicts"]
    assert judged[version]["plans_a_model"] >= 200
    assert len(verdicts) == judged[version]["plans_a_model"] * len(MODELS)
    assert {name: said for name, (_, said) in verdicts.items() if said != "accepted"} == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_spoilt_plans_were_refused(judged: dict[str, Any], version: str) -> None:
    controls = judged[version]["controls"]
    assert controls.keys() == CONTROLS.keys()
    assert [name for name, said in controls.items() if said == "accepted"] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_todays_exports_are_those_that_were_judged(judged: dict[str, Any], version: str) -> None:
    verdicts, count = judged[version]["verdicts"], 5  # the first plans of each model; the draw is seeded
    exports = {name: export for name, (_, export) in plans(version, count).items()}
    changed = [name for name, export in exports.items() if verdicts[name][0] != digest(export)]
    assert changed == [], "judge the plans anew: python lab/proofs/trainers/judge_plans.py --help"
