"""What torchtitan cannot run is said in a sentence, and what it can run has none."""

from __future__ import annotations

import tomllib

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.registry import trainer_of
from moesim.simulator.trainers.rules import facts_of
from moesim.simulator.trainers.torchtitan.export import (
    torchtitan_snippet,
    torchtitan_toml,
)
from moesim.simulator.trainers.torchtitan.rules import flavor_of, problems

PIPELINED = (
    "schedule=1f1b",
    "precision=bf16",
    "recompute=op",
    "parallel.zero_stage=1",
    "stages.layers=[4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1]",
)
"""What the pipelined plan of DeepSeek-V3 without MTP needs to run in torchtitan."""
WHOLE = ("schedule=1f1b", "precision=bf16", "recompute=op", "parallel.pp=1", "batch.sequences=2048")
"""The same without a pipeline, one micro-batch a GPU."""


SHARDED = (*WHOLE, "parallel.zero_stage=3")


def deepseek(*overrides: str) -> Scenario:
    scenario = load_scenario("deepseek-v3-2048xh800", list(overrides))
    return scenario.replace(model=scenario.shape.model_copy(update={"mtp_layers": 0}).model_dump(mode="json"))


def sentences(scenario: Scenario, version: str = "0.3.0") -> tuple[str, ...]:
    return problems(facts_of(scenario), version)


@pytest.mark.parametrize(
    ("overrides", "version", "expected"),
    [
        ((*PIPELINED, "schedule=dualpipe"), "0.3.0", "schedule dualpipe: torch.distributed"),
        ((*PIPELINED, "schedule=zb-h1"), "0.3.0", "schedule zb-h1"),
        ((*PIPELINED, "parallel.zero_stage=2"), "0.3.0", "use parallel.zero_stage: 1"),
        ((*PIPELINED, "parallel.zero_stage=3"), "0.2.2", "use parallel.zero_stage: 1"),
        ((*PIPELINED, "parallel.zero_stage=0"), "0.2.2", "ZeRO stage 0 with parallel.ep=64"),
        ((*WHOLE, "parallel.zero_stage=1"), "0.3.0", "nearest: parallel.zero_stage: 2"),
        (
            (*WHOLE, "parallel.zero_stage=1", "batch.sequences=4096"),
            "0.3.0",
            "nearest: parallel.zero_stage: 3",
        ),
        ((*WHOLE, "parallel.zero_stage=2", "batch.sequences=4096"), "0.3.0", "again for every micro-batch"),
        ((*PIPELINED, "recompute=selective"), "0.3.0", "recompute=selective: torchtitan checkpoints"),
        ((*PIPELINED, "precision=fp8"), "0.2.2", "FP8 GEMMs with scales by tile"),
        ((*PIPELINED, "precision=fp8"), "0.2.2", "precision.moments=bf16: torchtitan has fp32 only"),
        ((*PIPELINED, "parallel.cp=2"), "0.2.2", "attends with FlexAttention"),
        ((*PIPELINED, "routing.eplb={redundant_experts: 32}"), "0.3.0", "experts in order"),
        ((*PIPELINED, "software.dropout=true"), "0.3.0", "dropout"),
        ((*PIPELINED, "software.attention=unfused"), "0.3.0", "unfused attention"),
        (
            (*PIPELINED, "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.expert_tp=2"),
            "0.3.0",
            "torchtitan 0.3.0 does not split experts",
        ),
        (
            (*PIPELINED, "parallel.tp=4", "parallel.sequence_parallel=true", "parallel.ep=2"),
            "0.2.2",
            "ep must be a multiple of 4",
        ),
        (
            (*SHARDED, "parallel.ep=1", "parallel.tp=2", "parallel.expert_tp=1"),
            "0.3.0",
            "use parallel.expert_tp: 2",
        ),
        (
            (*SHARDED, "parallel.tp=2", "parallel.sequence_parallel=false"),
            "0.2.2",
            "without sequence parallelism",
        ),
        ((*SHARDED, "parallel.ep=1"), "0.3.0", "FSDP cuts them evenly"),
        ((*SHARDED, "batch.sequence_length=4095"), "0.3.0", "a multiple of 2 x cp x tp = 2"),
    ],
)
def test_each_limit_is_named(overrides: tuple[str, ...], version: str, expected: str) -> None:
    assert any(expected in sentence for sentence in sentences(deepseek(*overrides), version))


def test_dualpipev_overlaps_its_pairs_in_the_older_release_only_and_without_recomputation() -> None:
    layers = "stages.layers=" + str([2] * 30 + [1] + [0])
    overrides = (*PIPELINED, "schedule=dualpipev", layers, "parallel.pp=16", "recompute=none")
    assert sentences(deepseek(*overrides), "0.2.2") == ()
    assert any("no longer overlaps" in s for s in sentences(deepseek(*overrides), "0.3.0"))
    recomputed = sentences(deepseek(*overrides, "recompute=full"), "0.2.2")
    assert any("recompute=full with DualPipeV" in s for s in recomputed)


def test_mtp_modules_run_in_the_newest_release_without_a_pipeline() -> None:
    whole = load_scenario("deepseek-v3-2048xh800", [*WHOLE, "parallel.zero_stage=3"])
    assert sentences(whole, "0.3.0") == ()
    assert any("MTP modules" in s for s in sentences(whole, "0.2.2"))
    assert "num_mtp_layers=1" in torchtitan_snippet(whole)
    piped = load_scenario("deepseek-v3-2048xh800", list(PIPELINED))
    assert any("MTP modules with pipeline" in s for s in sentences(piped, "0.3.0"))


def test_a_family_without_stages_is_refused_by_release() -> None:
    scenario = load_scenario("qwen3-235b-a22b-256xh100", ["recompute=op"])
    assert any("cannot cut qwen3 into stages" in s for s in sentences(scenario, "0.2.2"))
    assert sentences(scenario, "0.3.0") == ()


def test_key_and_value_heads_limit_tensor_parallelism() -> None:
    overrides = ["recompute=op", "parallel.tp=8", "parallel.ep=8"]
    scenario = load_scenario("qwen3-235b-a22b-256xh100", overrides)
    assert any(
        "whole key and value heads, of which there are 4; nearest: 4" in s for s in sentences(scenario)
    )


def test_an_unknown_release_lists_the_supported_ones() -> None:
    with pytest.raises(InputError, match=r"0\.2\.2, 0\.3\.0"):
        sentences(deepseek(), "0.2.3")


@pytest.mark.parametrize(
    ("model", "version", "flavor"),
    [
        ("deepseek-v3", "0.2.2", ("deepseek_v3", "671B")),
        ("llama-3-70b", "0.3.0", ("llama3", "70B")),
        ("qwen3-235b-a22b", "0.3.0", ("qwen3", "235B-A22B")),
        ("mixtral-8x7b", "0.3.0", None),
    ],
)
def test_models_are_found_by_their_sizes(model: str, version: str, flavor: tuple[str, str] | None) -> None:
    found = flavor_of(load_model(model), version)
    assert (None if found is None else (found.family, found.name)) == flavor


def test_the_toml_holds_the_plan_and_its_comments_the_rest() -> None:
    configuration = torchtitan_toml(deepseek(*PIPELINED))
    data = tomllib.loads(configuration.body)
    assert data["model"] == {"name": "deepseek_v3", "flavor": "671B"}
    fields = data["parallelism"]
    assert (fields["pipeline_parallel_degree"], fields["expert_parallel_degree"]) == (16, 64)
    assert fields["data_parallel_shard_degree"] == 128 and fields["fsdp_reshard_after_forward"] == "never"
    assert fields["module_fqns_per_model_part"][-1] == ["layers.60", "norm", "output"]
    assert data["training"]["local_batch_size"] * 128 == data["training"]["global_batch_size"] == 15360
    assert data["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    for sentence in configuration.unspelled:
        assert f"# not spelled: {sentence}\n" in configuration.body
    assert any("communication SMs" in sentence for sentence in configuration.unspelled)


def test_a_model_without_a_flavor_names_none() -> None:
    configuration = torchtitan_toml(load_scenario("mixtral-8x7b-64xh100"))
    assert tomllib.loads(configuration.body)["model"]["flavor"] == "a-flavor-of-your-own"
    assert any("ships no flavor" in sentence for sentence in configuration.unspelled)


def test_experts_inside_the_only_replica_have_nothing_to_shard_over_in_the_older_release() -> None:
    overrides = ["parallel.tp=4", "parallel.ep=4", "parallel.sequence_parallel=true", "parallel.zero_stage=0"]
    whole = [*overrides, "parallel.pp=1", "schedule=1f1b", "recompute=op"]
    scenario = load_scenario("mixtral-8x7b-64xh100", [*whole, "cluster={accelerator: h100-sxm, nodes: 1}"])
    single = scenario.replace(cluster={"nodes": 1}, parallel={"tp": 8, "ep": 8})
    assert any("no ranks to shard over" in sentence for sentence in sentences(single, "0.2.2"))
    assert sentences(single, "0.3.0") == ()


def test_the_newest_export_says_all_that_its_comments_say() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", ["schedule=1f1b", "recompute=full", "precision=bf16"])
    export = trainer_of("torchtitan").arguments(scenario)
    said = [line for line in export.text().splitlines() if line.startswith("# not spelled: ")]
    assert [f"# not spelled: {sentence}" for sentence in export.unspelled] == said
    assert len(said) > len(trainer_of("torchtitan").problems_of(scenario))
