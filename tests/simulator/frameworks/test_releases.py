"""simulator/frameworks: a release is one value of `software`, single switches override it, all is told."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels import InputError
from moesim.simulator.frameworks.registry import NONE, RELEASES, release_of
from moesim.simulator.frameworks.software import PLAIN, Software
from moesim.simulator.scenario import Scenario

SMALL = ("mixtral-8x7b-64xh100", "batch.sequences=64")


@pytest.mark.parametrize("name", RELEASES)
def test_every_answer_is_a_legal_value_with_a_source(name: str) -> None:
    software, release = Software(framework=name), release_of(name)
    assert {switch: getattr(software, switch) for switch in release.answers} == release.switches
    assert all(" " in answer.source or "/" in answer.source for answer in release.answers.values())
    assert software.model_fields_set == {"framework"}
    left = [switch for switch in Software.model_fields if switch not in {"framework", *release.answers}]
    assert all(getattr(software, switch) == getattr(PLAIN, switch) for switch in left)


def test_a_stated_switch_overrides_the_answer_and_null_leaves_it() -> None:
    software = Software.model_validate(
        {"framework": "nemo-25", "loss": "fused", "bucket_parameters": None}, context={"place": "a file"}
    )
    assert software.loss == "fused" and software.bucket_parameters == 134_217_728
    assert software.model_dump() == {"framework": "nemo-25", "loss": "fused"}
    assert Software.model_validate(software.model_dump()) == software
    assert software.model_dump(context={"resolved": True})["bucket_parameters"] == 134_217_728


def test_without_a_framework_nothing_is_answered_and_dumps_stay_as_they_were() -> None:
    assert Software(framework=NONE) == PLAIN == Software()
    assert "framework" not in PLAIN.model_dump() and PLAIN.model_dump()["loss"] == "fused"
    assert not any(item.key.startswith("software") for item in moesim.load(*SMALL).defaults)


def test_a_release_changes_the_step_and_its_answers_are_defaults_with_sources() -> None:
    bridge = moesim.load(*SMALL, "software.framework=megatron-bridge-0.4")
    defaults = {item.key: item for item in bridge.defaults}
    assert defaults["software.loss"].value == "compiled"
    assert "Megatron-Bridge@v0.4.0" in defaults["software.loss"].source
    assert "software.overlap_data_parallel" not in defaults  # the preset states it
    step = moesim.simulate(bridge).step.time_s
    assert step > moesim.simulate(*SMALL).step.time_s  # passes of the loss, split biases and checks for NaN
    again = Scenario.model_validate(bridge.to_dict())
    assert again.software == bridge.software and again.defaults == bridge.defaults
    assert (
        moesim.simulate(bridge.replace(**{"software.framework": NONE})).step == moesim.simulate(*SMALL).step
    )


def test_another_framework_answers_anew_in_a_scenario_that_was_dumped() -> None:
    dumped = moesim.load(*SMALL, "software.router=fused").to_dict()
    assert dumped["software"]["loss"] == "fused"  # a dump has every switch
    core = moesim.load(dumped, "software.framework=megatron-core-0.17")
    assert (core.software.loss, core.software.router) == ("chain", "fused")
    assert core.software.model_fields_set == {"framework", "router", "overlap_data_parallel"}
    stated = moesim.load(*SMALL, "software.loss=fused", "software.framework=megatron-core-0.17")
    assert stated.software.loss == "fused"


def test_an_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'megatron-core-0\.18' is not known \(nearest: .*nemo-25") as error:
        moesim.load(*SMALL, "software.framework=megatron-core-0.18")
    assert error.value.key == "software.framework" and error.value.nearest == RELEASES
    with pytest.raises(InputError, match=r"framework='5' is not known"):
        moesim.load(*SMALL, "software.framework=5")
    with pytest.raises(InputError, match="unknown key"):
        moesim.load(*SMALL, "software={framework: nemo-25, los: chain}")
