"""What a scenario leaves out is chosen by rule, told in the result, and chosen anew for other hardware."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.confidence import best_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.node import load_node
from moesim.hwmodels.price import RentChoice, load_prices
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import dump_mapping, load_mapping, shipped_names
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.defaults import RULES, network_of, node_of, price_of
from moesim.simulator.scenario.outline import ClusterOutline
from moesim.simulator.studies.space import key_of

ROOT = Path(__file__).resolve().parents[3]
FIVE = ROOT / "examples" / "five-lines.yaml"
HOME = "deepseek-v3-2048xh800"


def five(**keys: Any) -> Scenario:
    """The shipped five lines with other top-level keys."""
    return validate_model(Scenario, load_mapping(FIVE) | keys, "five.yaml")


def chosen(scenario: Scenario) -> dict[str, object]:
    return {item.key: item.value for item in scenario.defaults}


# -- five lines ----------------------------------------------------------------------------------------


def test_five_lines_run_and_the_result_lists_what_nobody_stated() -> None:
    assert len(FIVE.read_text().strip().splitlines()) == 5
    assert set(load_mapping(FIVE)) == {"model", "cluster", "parallel", "schedule", "batch"}
    result = moesim.simulate(str(FIVE))
    assert result.memory.fits
    assert result.step.lower_bound_s < result.step.time_s < result.step.upper_bound_s
    assert result.run.cost_usd is not None
    told = {item["key"]: item for item in result.to_dict()["defaults"]}
    own = {key: told.pop(key) for key in list(told) if key.startswith("software")}
    assert own["software.framework"]["value"] == "megatron-core-0.17"
    assert own["software.host"]["value"] == "xeon-8480c" and own["software.loss"]["value"] == "chain"
    assert set(told) == {
        "communication.kernels", "name", "profile", "precision", "routing.expert_load_cv",
        "variation.clock_cv", "variation.jitter_cv",
        "run.tokens", "cluster.node", "cluster.network", "cluster.price_per_gpu_hour",
    }  # fmt: skip
    for item in told.values():
        assert set(item) == {"key", "value", "why", "kind", "source", "range"}
        assert item["why"] and item["source"]
    assert told["profile"]["value"] == result.profile == "h100-layers"
    assert told["variation.clock_cv"]["range"] == [0.0089, 0.0138]
    sentence = next(s for s in moesim.explain(result).sentences if "follow from rules" in s)
    assert f"{len(told) + len(own)} values" in sentence and "routing.expert_load_cv" in sentence
    assert "software.host" in sentence and f"{len(own) - 2} switches of software" in sentence


def test_the_scenario_page_shows_these_five_lines() -> None:
    assert FIVE.read_text() in (ROOT / "docs" / "scenario.md").read_text("utf-8")


def test_a_scenario_that_states_all_has_no_defaults() -> None:
    home = load_scenario(HOME)
    assert home.defaults == ()
    assert "defaults" not in key_content(home)


def key_content(scenario: Scenario) -> str:
    return json.dumps(scenario.to_dict())


STATED: dict[str, Any] = {
    "name": "mine",
    "profile": "generic-roofline",
    "precision": "fp8",
    "routing": {"expert_load_cv": 0.3},
    "variation": {"clock_cv": 0.0, "jitter_cv": 0.0},
    "run": {"tokens": 5e9},
    "communication": {"sms": 8},
    "software": {"framework": "none"},
}


def test_what_is_stated_wins() -> None:
    scenario = five(**STATED)
    assert set(chosen(scenario)) == {"cluster.node", "cluster.network", "cluster.price_per_gpu_hour"}
    assert (scenario.profile, scenario.recipe.linear, scenario.run.tokens) == ("generic-roofline", "fp8", 5e9)
    assert scenario.routing.expert_load_cv.value == 0.3 and scenario.communication.sms == 8
    half = five(variation={"clock_cv": 0.02})
    assert half.variation.clock_cv.value == 0.02 and "variation.clock_cv" not in chosen(half)
    assert half.variation.jitter_cv.value == 0.019 and "variation.jitter_cv" in chosen(half)


def test_null_leaves_a_key_to_its_rule() -> None:
    back = five(**STATED).overridden("routing.expert_load_cv=null", "variation=null")
    assert {"routing.expert_load_cv", "variation.clock_cv"} <= set(chosen(back))
    assert "expert_load_cv" not in back.to_dict()["routing"]
    assert five(**STATED).overridden("profile=null", "run=null", "precision=null").resolved() == (
        five(**{k: v for k, v in STATED.items() if k not in ("profile", "run", "precision")}).resolved()
    )


# -- chosen anew ---------------------------------------------------------------------------------------


def test_another_cluster_chooses_anew() -> None:
    scenario = five()
    for changed in (
        scenario.replace(cluster="mi300x-2048"),
        scenario.overridden("cluster=mi300x-2048"),
        load_scenario(str(FIVE), ["cluster=mi300x-2048"]),
    ):
        assert changed.profile == "generic-roofline"
        assert changed.name == "qwen3-30b-a3b-2048xmi300x"
        assert changed.variation.clock_cv.between == (0.006, 0.024)
        assert "cluster.node" not in chosen(changed)
    assert scenario.replace(profile="h100-products").replace(seed=1).profile == "h100-products"
    other = scenario.overridden("cluster.accelerator=b200-sxm")
    assert (other.profile, other.machine.nodes) == ("b200-layers", 4)
    named = scenario.overridden("cluster=h100-1024", "cluster.accelerator=h200-sxm")
    assert (named.machine.nodes, named.profile) == (128, "h200-8gpu")


def test_one_figure_below_a_default_can_change() -> None:
    for texts in (["precision.gradient_reduce=bf16"], ["precision={linear: bf16, gradient_reduce: bf16}"]):
        changed = load_scenario(str(FIVE), texts)
        assert changed.recipe.linear == "bf16" and changed.recipe.gradient_reduce == "bf16"
    wider = five().overridden("cluster.node.nic_bandwidth=800 Gb/s")
    assert isinstance(wider.cluster, ClusterOutline) and wider.cluster.left_out == ("network",)
    assert wider.machine.node.nic_bandwidth is not None
    assert wider.machine.node.nic_bandwidth.value == 100e9
    more = five().overridden("cluster.accelerator.hbm=96 GiB")
    assert more.machine.accelerator.hbm_bytes == 96 * 2**30 and more.profile == "h100-layers"
    slower = five().overridden("cluster.network.fabric.link_bandwidth=100 Gb/s")
    assert slower.machine.network.name == "mrft-ib-400g"
    assert "cluster.network" not in chosen(slower) and "cluster.node" in chosen(slower)


# -- round trips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {},
        STATED,
        {"routing": {"gate": "best"}, "run": {"replicas": 10}},
        {"cluster": {"accelerator": "h100-sxm", "nodes": 4, "price_per_gpu_hour": None}},
        {"cluster": {"node": "hgx-h100", "nodes": 4, "network": "ft3-ib-400g", "price_per_gpu_hour": None}},
    ],
)
def test_round_trips_are_exact(tmp_path: Path, keys: dict[str, Any]) -> None:
    scenario = five(**keys)
    (tmp_path / "s.yaml").write_text(dump_mapping(scenario.to_dict()))
    again = load_scenario(str(tmp_path / "s.yaml")).based_on("")
    texts = (
        scenario,
        again,
        Scenario.model_validate(scenario.to_dict()),
        pickle.loads(pickle.dumps(scenario)),
    )
    assert len({json.dumps(s.resolved()) for s in texts}) == 1
    assert len({json.dumps(s.to_dict()) for s in texts}) == 1
    assert len({s.defaults for s in texts}) == 1
    assert not set(chosen(scenario)) & set(flat(scenario.to_dict()))
    assert again.machine.price_per_gpu_hour == scenario.machine.price_per_gpu_hour


def flat(data: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in data.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return found


def test_equal_values_stated_or_chosen_are_kept_apart() -> None:
    """Their results differ in what nobody stated."""
    scenario = five()
    stated = scenario.replace(profile=scenario.profile)
    assert stated.resolved() == scenario.resolved()
    assert key_of(stated) != key_of(scenario)


# -- rules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "cluster", "precision"),
    [
        ("deepseek-v3", "h100-1024", "fp8"),
        ("deepseek-v3", "a100-512", "bf16"),
        ("mixtral-8x7b", "h100-1024", "bf16"),
    ],
)
def test_fp8_where_the_model_was_trained_in_it_and_the_accelerator_has_it(
    model: str, cluster: str, precision: str
) -> None:
    assert five(model=model, cluster=cluster).precision == precision


@pytest.mark.parametrize("accelerator", ["h100-sxm", "h200-sxm", "mi300x", "tpu-v5p"])
def test_the_profile_is_the_best_that_there_is(accelerator: str) -> None:
    scenario = five(cluster={"accelerator": accelerator, "nodes": 1})
    level, name = best_profile(load_accelerator(accelerator))
    assert scenario.profile == name
    assert level in next(item.why for item in scenario.defaults if item.key == "profile")


def test_a_dedicated_engine_takes_no_sms() -> None:
    scenario = five(cluster="trn2-2048", batch={"sequences": 8192, "sequence_length": 4096})
    assert scenario.communication.sms == 0 and chosen(scenario)["communication.sms"] == 0
    assert moesim.check(scenario).n_gpus == 2048
    assert five().communication.sms == 20 and "communication.sms" not in chosen(five())


def test_every_shipped_accelerator_with_a_node_can_be_named() -> None:
    for name in shipped_names("nodes"):
        accelerator = load_node(name).accelerator.name
        node = load_node(node_of(accelerator))
        assert node.accelerator.name == accelerator
        machine = five(cluster={"accelerator": accelerator, "nodes": 1}).machine
        assert machine.node == node and machine.network.name == "single-node"
        assert network_of(load_node("hgx-h100"), 2) == "mrft-ib-400g"


@pytest.mark.parametrize(
    ("nodes", "network"), [(1, "single-node"), (256, "mrft-ib-400g"), (512, "ft3-ib-400g")]
)
def test_the_network_is_the_smallest_that_takes_the_nodes(nodes: int, network: str) -> None:
    scenario = five(cluster={"accelerator": "h100-sxm", "nodes": nodes})
    assert scenario.machine.network.name == network
    assert chosen(scenario)["cluster.network"] == network


def test_prices_are_offers() -> None:
    offer = price_of(load_node("hgx-h200"))
    assert offer is not None and offer in load_prices("h200-sxm").offers and offer.term == "reserved"
    rack = price_of(load_node("gb200-nvl72-64"))
    reserved = load_prices("gb200").choose(RentChoice(term="reserved"))
    assert rack is not None and rack.value == pytest.approx(reserved.value * 72 / 64)
    assert price_of(load_node("gaudi3-8")) is None
    none = five(cluster={"accelerator": "gaudi3", "nodes": 4})
    assert none.machine.price_per_gpu_hour is None


def test_every_range_holds_its_value() -> None:
    for architecture in ("h100-sxm", "mi300x"):
        scenario = five(cluster={"accelerator": architecture, "nodes": 4})
        ranged = [item for item in scenario.defaults if item.range is not None]
        assert len(ranged) == 3
        for item in ranged:
            assert item.range is not None and isinstance(item.value, float)
            assert item.range[0] < item.value < item.range[1]


# -- fleets --------------------------------------------------------------------------------------------


def test_every_pool_of_a_fleet_has_its_own() -> None:
    pools = [
        {"cluster": {"accelerator": "h100-sxm", "nodes": 2}},
        {"cluster": {"accelerator": "a100-sxm", "nodes": 2}},
    ]
    data = load_mapping(FIVE) | {
        "fleet": {"pools": pools},
        "parallel": {"pp": 4, "ep": 8, "zero_stage": 1},
        "batch": {"sequences": 64, "sequence_length": 4096},
        "recompute": "selective",
        "model": "deepseek-v3",
    }
    del data["cluster"]
    scenario = validate_model(Scenario, data, "fleet")
    assert [p.name for p in scenario.calibrations] == ["h100-layers", "a100-layers"]
    assert scenario.precision == "bf16"  # the A100 has no FP8
    assert {"fleet.pools.0.profile", "fleet.pools.1.profile", "fleet.pools.1.cluster.node"} <= set(
        chosen(scenario)
    )
    assert "profile" not in chosen(scenario)
    assert Scenario.model_validate(scenario.to_dict()) == scenario
    result = moesim.simulate(scenario.replace(model="qwen3-30b-a3b"))
    assert [pool.profile for pool in result.pools] == ["h100-layers", "a100-layers"]
    assert any(item.key == "fleet.pools.1.profile" for item in result.defaults)
    stated = scenario.replace(profile="generic-roofline")
    assert [p.name for p in stated.calibrations] == ["generic-roofline"] * 2


# -- refusals, schema ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"batch": None}, r"five\.yaml: batch=None"),
        ({"cluster": {"accelerator": "h100-sxm"}}, "number of nodes or of GPUs"),
        ({"cluster": {"nodes": 4}}, "exactly one of accelerator and node"),
        ({"cluster": {"accelerator": "h100-sxm", "node": "hgx-h100", "nodes": 4}}, "exactly one of"),
        ({"cluster": {"accelerator": "h100-sxn", "nodes": 4}}, r"no shipped node \(nearest: 'h100-sxm'\)"),
        (
            {"cluster": {"accelerator": "h100-sxm", "nods": 4}},
            r"cluster\.nods: unknown key \(nearest: 'nodes'\)",
        ),
        ({"cluster": {"accelerator": "h100-sxm", "nodes": 90_000}}, "use fewer nodes"),
        ({"cluster": {"accelerator": "h100-sxm", "nodes": 4, "network": "mrft"}}, "unknown network 'mrft'"),
        ({"cluster": "h101-1024"}, r"five\.yaml: unknown cluster 'h101-1024' \(nearest: 'h100-1024'\)"),
        ({"model": "mixtral"}, r"unknown model 'mixtral' \(nearest"),
        ({"profil": "x"}, r"profil: unknown key \(nearest: 'profile'\)"),
    ],
)
def test_what_is_wrong_is_one_paragraph(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        five(**keys)
    assert "\n" not in str(caught.value)


def test_a_missing_required_key_is_named() -> None:
    data = load_mapping(FIVE)
    del data["batch"], data["parallel"]
    with pytest.raises(InputError, match="the keys parallel, batch are missing"):
        validate_model(Scenario, data, "five.yaml")


def test_the_schema_says_what_an_absent_key_means() -> None:
    schema = Scenario.model_json_schema()
    assert set(schema["required"]) == {"model"}
    for key in RULES:
        *section, name = key.split(".")
        where = schema["properties"] if not section else definition(schema, section[0])["properties"]
        assert "Absent:" in where[name]["description"] and name not in definition(schema, *section).get(
            "required", ()
        )


def test_the_schema_takes_every_form_of_a_cluster() -> None:
    schema = Scenario.model_json_schema()
    assert "default" not in schema["properties"]["profile"] and "default" not in schema["properties"]["name"]
    forms = schema["properties"]["cluster"]["anyOf"]
    assert not any("oneOf" in form for form in forms)  # a full description fits the outline's schema too
    assert {"$ref": "#/$defs/ClusterOutline"} in forms[0].get("anyOf", forms)


def definition(schema: dict[str, Any], section: str | None = None) -> dict[str, Any]:
    titles = {
        "communication": "Communication",
        "routing": "Routing",
        "variation": "Variation",
        "run": "RunPlan",
        "parallel": "ParallelPlan",
        "software": "Software",
    }
    found: dict[str, Any] = schema if section is None else schema["$defs"][titles[section]]
    return found


# -- tensor parallelism with experts ---------------------------------------------------------------------


def shown(scenario: Scenario) -> dict[str, Any]:
    return {item.key: item.value for item in scenario.defaults if item.key.startswith("parallel.")}


def test_experts_of_a_tensor_parallel_plan_are_split_without_expert_parallelism() -> None:
    """Megatron core and torchtitan split them; whole ones take 276 GiB of Mixtral 8x7B on 32 H100."""
    plan = five(model="mixtral-8x7b", parallel={"tp": 8, "zero_stage": 1})
    assert (plan.parallel.expert_tp, plan.parallel.sequence_parallel) == (8, True)
    assert shown(plan) == {"parallel.sequence_parallel": "true", "parallel.expert_tp": 8}
    assert run_step(plan).prepared.memory.total_bytes < 80 * 2**30
    whole = plan.overridden("parallel.expert_tp=1")
    assert whole.parallel.expert_tp == 1
    assert "parallel.expert_tp" not in shown(whole)


def test_experts_are_whole_beside_expert_parallelism_and_the_sequence_is_split() -> None:
    plan = five(parallel={"tp": 4, "ep": 8, "zero_stage": 1})
    assert (plan.parallel.expert_tp, plan.parallel.sequence_parallel) == (1, True)
    assert shown(plan) == {"parallel.sequence_parallel": "true", "parallel.expert_tp": 1}
    assert run_step(plan).time_s > 0.0  # was refused until sequence_parallel: true was written
    assert plan.to_dict()["parallel"] == {**plan.to_dict()["parallel"], "tp": 4, "ep": 8}
    assert not {"expert_tp", "sequence_parallel"} & set(plan.to_dict()["parallel"])
    with pytest.raises(InputError, match="sequence_parallel: true"):
        run_step(plan.overridden("parallel.sequence_parallel=false"))


def test_options_of_split_experts_follow_the_plan_that_an_override_makes() -> None:
    plan = five().overridden("parallel.tp=8", "parallel.ep=1")
    assert (plan.parallel.expert_tp, plan.parallel.sequence_parallel) == (8, True)
    assert shown(five()) == {}
    dense = five(model="llama-3-8b", parallel={"tp": 8})
    assert (dense.parallel.expert_tp, dense.parallel.sequence_parallel, shown(dense)) == (1, False, {})


# -- a part of a node ------------------------------------------------------------------------------------


def machine_of(**cluster: Any) -> Cluster:
    return five(cluster=cluster).machine


@pytest.mark.parametrize(
    ("cluster", "nodes", "each"),
    [
        ({"accelerator": "h100-sxm", "gpus": 1}, 1, 1),
        ({"accelerator": "h100-sxm", "gpus": 16}, 2, 8),
        ({"accelerator": "h100-sxm", "gpus": 8, "nodes": 2}, 2, 4),
        ({"node": "gb200-nvl72", "gpus": 8}, 1, 8),
        ({"accelerator": "mi300x", "gpus": 4}, 1, 4),
    ],
)
def test_gpus_are_whole_nodes_or_a_part_of_each(cluster: dict[str, Any], nodes: int, each: int) -> None:
    machine = machine_of(**cluster)
    assert (machine.nodes, machine.node.n_gpus, machine.n_gpus) == (nodes, each, nodes * each)
    whole = machine_of(**{key: value for key, value in cluster.items() if key != "gpus"} | {"nodes": 1})
    if whole.node.power is not None:
        assert machine.node.power_w_per_gpu == pytest.approx(whole.node.power_w_per_gpu)
    assert machine.node.scale_out_bytes_per_s == whole.node.scale_out_bytes_per_s
    assert run_step(five(cluster=cluster, parallel={"ep": each, "zero_stage": 1})).time_s > 0.0


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        ({"accelerator": "h100-sxm", "gpus": 12}, "cluster.gpus=12 .* nearest: 8, 16"),
        ({"accelerator": "h100-sxm", "gpus": 8, "nodes": 3}, "cluster.gpus=8 .* nearest: 6"),
        ({"accelerator": "h100-sxm", "gpus": 32, "nodes": 2}, "nearest: 16"),
        ({"accelerator": "h100-sxm"}, "number of nodes or of GPUs"),
        ({"accelerator": "h100-sxm", "gpus": 0}, "greater than or equal to 1"),
        ({"accelerator": "tpu-v5p", "gpus": 8}, "dimensions of the slice"),
    ],
)
def test_gpus_that_no_nodes_hold_are_refused(cluster: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        machine_of(**cluster)


@pytest.mark.parametrize("name", ["m2-ultra", "m3-ultra", "m4-max"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", {"linear": "fp4"}], ids=["bf16", "fp8", "fp4"])
def test_no_precision_is_advised_where_none_runs(name: str, precision: object) -> None:
    with pytest.raises(InputError, match="no precision runs on it; choose another accelerator") as refused:
        run_step(five(cluster={"accelerator": name, "nodes": 1}, parallel={}, precision=precision))
    assert "choose one of" not in str(refused.value)


def test_a_missing_precision_advises_those_that_run() -> None:
    with pytest.raises(InputError, match="precisions that it has are bf16: choose one of them"):
        run_step(five(cluster={"accelerator": "a100-sxm", "nodes": 4}, precision="fp8"))
