"""simulator/frameworks: a release is one value of `software`, single switches override it, all is told."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels import InputError
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.frameworks.registry import NONE, RELEASES, release_of
from moesim.simulator.frameworks.software import PLAIN, Software
from moesim.simulator.layout.job import resolve
from moesim.simulator.scenario import Scenario

SMALL = ("mixtral-8x7b-64xh100", "batch.sequences=64", "software.framework=none")


@pytest.mark.parametrize("name", RELEASES)
def test_every_answer_is_a_legal_value_with_a_source(name: str) -> None:
    software, release = Software(framework=name), release_of(name)
    assert {switch: getattr(software, switch) for switch in release.answers} == release.switches
    assert all(" " in answer.source or "/" in answer.source for answer in release.answers.values())
    assert software.model_fields_set == {"framework"}
    left = [switch for switch in Software.model_fields if switch not in {"framework", *release.answers}]
    assert all(getattr(software, switch) == getattr(PLAIN, switch) for switch in left)


@pytest.mark.parametrize("name", ["megatron-core-0.16", "megatron-core-0.17", "megatron-bridge-0.4"])
def test_megatron_core_answers_every_switch(name: str) -> None:
    assert not release_of(name).assumed(Software.model_fields)
    assert set(release_of("nemo-25").assumed(Software.model_fields)) == {
        "pad_expert_rows", "expert_biases", "scaled_rotary", "placeholder_gradients", "gradient_sync",
    }  # fmt: skip


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
    assert PLAIN.model_dump() == {} and PLAIN.model_dump(context={"resolved": True})["loss"] == "fused"
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
    assert dumped["software"] == {"framework": NONE, "overlap_data_parallel": True, "router": "fused"}
    core = moesim.load(dumped, "software.framework=megatron-core-0.17")
    assert (core.software.loss, core.software.router) == ("chain", "fused")
    assert core.software.model_fields_set == {"framework", "router", "overlap_data_parallel"}


# -- the rule ------------------------------------------------------------------------------------------

BARE = {
    "model": "mixtral-8x7b",
    "cluster": {"accelerator": "h100-sxm", "nodes": 4},
    "parallel": {"pp": 4, "ep": 8, "zero_stage": 1},
    "batch": {"sequences": 32, "sequence_length": 2048},
}


@pytest.mark.parametrize(
    ("changes", "release", "host", "kernels"),
    [
        ((), "megatron-core-0.17", "xeon-8480c", "nccl"),
        (("parallel={zero_stage: 3, ep: 8}",), "torchtitan-0.2", "xeon-8480c", "nccl"),
        (("schedule=zbv",), "torchtitan-0.2", "xeon-8480c", "nccl"),
        (("schedule=dualpipe",), NONE, None, "deepep-2025-02"),
        (("cluster.accelerator=gb200", "cluster.nodes=1"), "megatron-core-0.17", "grace-gb200", "nccl"),
        (("cluster.accelerator=mi300x",), NONE, None, "nccl"),
        (("software.host=none",), "megatron-core-0.17", None, "nccl"),
        (("software.host=null",), "megatron-core-0.17", "xeon-8480c", "nccl"),
        (("software={framework: torchtitan-0.2, attention: flex}",), "torchtitan-0.2", "xeon-8480c", "nccl"),
    ],
)
def test_the_usual_trainer_host_and_dispatcher_are_chosen_and_told(
    changes: tuple[str, ...], release: str, host: str | None, kernels: str
) -> None:
    scenario = moesim.load(BARE, *changes)
    assert (scenario.software.framework, scenario.software.host) == (release, host)
    assert scenario.communication.kernels == kernels
    told = {item.key: item for item in scenario.defaults}
    stated = "framework" in scenario.to_dict().get("software", {})
    assert stated or told["software.framework"].value == release
    if host is not None:
        assert "times as long" in told["software.host"].why and told["software.host"].source
    again = moesim.load(scenario.to_dict())
    assert again.software == scenario.software and again.defaults == scenario.defaults


def test_a_rule_says_which_release_could_not_run_the_plan_and_a_stated_one_is_refused() -> None:
    by_rule = moesim.load(BARE, "schedule=zbv")
    why = {item.key: item.why for item in by_rule.defaults}["software.framework"]
    assert "megatron-core-0.17 cannot run the plan: schedule=zbv is not among its 1f1b" in why
    for overrides, words in (
        (
            ("schedule=zbv", "software.framework=megatron-core-0.17"),
            "nearest: schedule=1f1b, or .*torchtitan",
        ),
        (("recompute=op", "software.framework=megatron-core-0.17"), "recompute=op is not among its none"),
        (("recompute=[moe_act]", "software.framework=torchtitan-0.2"), "no list of modules"),
        (
            ("precision=fp8", "software.framework=torchtitan-0.2"),
            "fp8 tile is not among its bf16, fp8 tensor",
        ),
        (("communication.kernels=uccl-ep-low-latency", "software.framework=megatron-core-0.17"), "nccl-allg"),
    ):
        with pytest.raises(InputError, match=words) as error:
            moesim.simulate(BARE, *overrides)
        assert error.value.nearest


def test_a_move_leaves_host_and_trainer_to_the_rules_but_keeps_none() -> None:
    stated = moesim.load(BARE, "software.framework=megatron-core-0.17", "software.host=xeon-8480c")
    moved = stated.replace(cluster={"accelerator": "gb200", "nodes": 1})
    assert (moved.software.framework, moved.software.host) == ("megatron-core-0.17", "grace-gb200")
    assert stated.replace(cluster="mi300x-2048").software.framework == NONE
    none = moesim.load(BARE, "software.framework=none").replace(cluster={"accelerator": "gb200", "nodes": 1})
    assert none.software.framework == NONE and none.to_dict()["software"] == {"framework": NONE}


def test_an_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'megatron-core-0\.18' is not known \(nearest: .*nemo-25") as error:
        moesim.load(*SMALL, "software.framework=megatron-core-0.18")
    assert error.value.key == "software.framework" and error.value.nearest == RELEASES
    with pytest.raises(InputError, match=r"framework='5' is not known"):
        moesim.load(*SMALL, "software.framework=5")
    with pytest.raises(InputError, match="unknown key"):
        moesim.load(*SMALL, "software={framework: nemo-25, los: chain}")


# -- recipes -------------------------------------------------------------------------------------------

ROUTED = {
    "model": "qwen3-30b-a3b",
    "cluster": {"accelerator": "gb200", "nodes": 1},
    "parallel": {"ep": 8, "zero_stage": 1},
    "batch": {"sequences": 64, "sequence_length": 1024},
    "communication": {"kernels": "hybridep"},
    "software": {"framework": "megatron-bridge-0.6"},
}


@pytest.mark.parametrize(
    ("changes", "graphs", "router"),
    [
        (("precision=fp8", "precision.scaling=mx"), ("all",), "fused"),
        ((), ("attention", "router"), "fused"),
        (("software.framework=megatron-bridge-0.4",), ("attention", "router"), "fused"),
        (("software.framework=megatron-core-0.17",), (), "chain"),
        (("cluster.accelerator=b300-sxm", "cluster.nodes=8"), (), "chain"),
        (("communication.kernels=nccl",), (), "chain"),
        (("recompute=full",), (), "chain"),
        (("parallel.ep=1",), (), "chain"),
        (("software.cuda_graphs=[]",), (), "fused"),
        (("software.router=chain",), ("attention", "router"), "chain"),
    ],
)
def test_a_release_turns_on_what_its_recipes_of_such_plans_do_unless_it_is_stated(
    changes: tuple[str, ...], graphs: tuple[str, ...], router: str
) -> None:
    scenario = moesim.load(ROUTED, *changes)
    assert (scenario.software.cuda_graphs, scenario.software.router) == (graphs, router)
    told = [item for item in scenario.defaults if item.key == "software.cuda_graphs"]
    assert [item.value for item in told] == ([" ".join(graphs)] if graphs else [])
    assert sum(item.key == "software.router" for item in scenario.defaults) == (
        "router" not in scenario.to_dict()["software"]
    )
    assert moesim.load(scenario.to_dict()).software == scenario.software


def test_experts_in_a_graph_of_the_whole_step_have_buffers_of_a_fixed_size() -> None:
    software = moesim.load(ROUTED, "precision=fp8", "precision.scaling=mx").software
    assert software.static_experts is not None and software.static_experts.capacity == 1.5
    assert software.model_dump() == {"framework": "megatron-bridge-0.6"}


def test_torchtitan_0_3_has_no_rows_of_padding_in_bf16() -> None:
    """Gradients of padding, 1.0 us a row one after the other, are 0.2's alone."""
    job = {
        "model": "qwen3-30b-a3b", "cluster": {"accelerator": "h100-sxm", "nodes": 1}, "precision": "bf16",
        "parallel": {"zero_stage": 3, "ep": 8}, "batch": {"sequences": 8, "sequence_length": 4096},
    }  # fmt: skip
    found = {}
    for release in ("torchtitan-0.2", "torchtitan-0.3"):
        scenario = moesim.load(job, f"software.framework={release}")
        operators = Pricer(resolve(scenario)).operators("moe")["mlp I"]
        found[release] = [op for op in operators if op.variant == "eager_padding"]
    assert [op.bytes_read for op in found["torchtitan-0.2"]] == [8.0 * 8 * 128 / 8]
    assert found["torchtitan-0.3"] == []
