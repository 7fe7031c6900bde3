"""How a kind of attention is added: the class of one file, one line in the registry, and this test.

The toy kind is linear attention: every head keeps a matrix instead of keys and values (arXiv 2006.16236). It
stands in a hybrid model beside grouped-query attention.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from recipes import recipes

import moesim
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.cost.cost_table import block_compute
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.stages import blocks_of
from moesim.simulator.memory.activations import activation_bytes, cached_tensors
from moesim.simulator.model.attention import ATTENTION_KINDS, Attention
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.counts import (
    attention_flop_per_token,
    block_parameters,
    blocks_flop_per_token,
    flop_per_token,
    parameters_total,
)
from moesim.simulator.model.huggingface import to_yaml
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators import RECOMPUTE, block_operators, model_flop
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.trainers.megatron.arguments import megatron_arguments


def printed() -> type[Attention]:
    """The class of `simulator/model/attention/linear.py`, as the recipe prints it."""
    blocks = recipes()["An attention kind"].blocks
    module = ModuleType("linear_attention_of_the_recipe")
    sys.modules[module.__name__] = module
    exec(next(block.text for block in blocks if block.path.endswith("/linear.py")), module.__dict__)
    kind: type[Attention] = module.LinearAttention
    return kind


LinearAttention = printed()
LINEAR = {"kind": "linear", "heads": 16, "head_dim": 128}
PATTERN = ("linear*3", "full")
FULL = load_model("qwen3-30b-a3b")
BF16 = PRECISIONS["bf16"]
LINEAR_LAYERS, FULL_LAYERS = 36, 12


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_KINDS, "linear", LinearAttention)


def hybrid_data() -> dict[str, Any]:
    data = FULL.model_dump(mode="json")
    attentions = {"linear": LINEAR, "full": data.pop("attention")}
    return data | {"name": "hybrid", "attentions": attentions, "attention_layers": list(PATTERN)}


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "hybrid.yaml"
    file.write_text(dump_mapping({k: v for k, v in hybrid_data().items() if v is not None}))
    return str(file)


@pytest.fixture
def hybrid(path: str) -> ModelShape:
    return load_model(path)


def uniform(kind: str) -> ModelShape:
    attention = FULL.attention if kind == "full" else LinearAttention.model_validate(LINEAR)
    return FULL.model_copy(update={"attention": attention})


def scenario(model: str, *more: str) -> Scenario:
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            f"model={model}",
            "cluster={node: hgx-h200, nodes: 2, network: mrft-ib-400g, price_per_gpu_hour: $2.5/h}",
            "profile=h200-measured",
            "precision=bf16",
            "parallel={pp: 2, ep: 8, zero_stage: 1}",
            "schedule=1f1b",
            "batch.sequences=128",
            "recompute=selective",
            "run.tokens=1e11",
            *more,
        ],
    )


def test_a_model_file_has_layers_of_both_kinds(hybrid: ModelShape, tmp_path: Path) -> None:
    assert [layer.attention.kind for layer in hybrid.layers[:5]] == ["linear"] * 3 + ["gqa", "linear"]
    assert hybrid.layer_counts == {"moe/linear": LINEAR_LAYERS, "moe/full": FULL_LAYERS}
    assert hybrid.block_kinds == ("embedding", "moe/linear", "moe/full", "head")
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(hybrid))
    assert load_model(again) == hybrid and hash(load_model(again)) == hash(hybrid)
    assert "\nattention:" not in to_yaml(hybrid)


def test_a_kind_that_is_not_registered_is_refused_with_those_that_are(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ATTENTION_KINDS, "linear")
    with pytest.raises(InputError, match=r"attentions\.linear.*'linear'.*'mla', 'gqa'"):
        load_model(path)


def test_counts_are_sums_over_layers(hybrid: ModelShape) -> None:
    linear, full = uniform("linear"), uniform("full")
    share = LINEAR_LAYERS / hybrid.n_layers
    mean = share * parameters_total(linear) + (1 - share) * parameters_total(full)
    assert parameters_total(hybrid) == round(mean)
    for causal in (True, False):
        parts = [attention_flop_per_token(shape, 4096, causal) for shape in (linear, full)]
        assert attention_flop_per_token(hybrid, 4096, causal) == share * parts[0] + (1 - share) * parts[1]
        kinds = [block.kind for block in blocks_of(hybrid)]
        assert blocks_flop_per_token(hybrid, kinds, 4096, causal) == flop_per_token(hybrid, 4096, causal)


def operators(shape: ModelShape, kind: str, **more: Any) -> list[Operator]:
    rows = 4096.0 * 8
    found = block_operators(shape, kind, BF16, tokens=4096, sequence=4096, received_rows=rows, **more)
    return [op for ops in found.values() for op in ops]


def test_operators_do_the_model_flops_and_touch_every_parameter_once(hybrid: ModelShape) -> None:
    total = sum(
        count * model_flop(operators(hybrid, kind))
        for kind, count in (*hybrid.layer_counts.items(), ("head", 1))
    )
    assert total / 4096 == pytest.approx(flop_per_token(hybrid, 4096, causal=True), rel=2e-3)
    written = [op.gemm for op in operators(hybrid, "moe/linear") if op.direction == "W"]
    parameters = block_parameters(hybrid, "moe/linear")
    touched = sum(shape.m * shape.n * shape.groups for shape in written if shape is not None)
    assert touched == parameters.total - parameters.norms
    with pytest.raises(InputError, match="linear attention heads=16"):
        operators(hybrid, "moe/linear", tp=32)


def test_memory_of_both_kinds(hybrid: ModelShape) -> None:
    def kept(kind: str, policy: Recompute = "none", **software: Any) -> float:
        plan = ParallelPlan()
        return activation_bytes(hybrid, kind, BF16, policy, plan, 4096, Software(**software))

    assert kept("moe/full") == activation_bytes(FULL, "moe", BF16, "none", ParallelPlan(), 4096)
    assert kept("moe/linear", attention="unfused") == kept("moe/linear"), "no scores"
    assert kept("moe/full", attention="unfused") > kept("moe/full")
    names = {t.name for t in cached_tensors(hybrid, "moe/linear", BF16, "op")}
    assert {"attention output", "output of q", "output of v"} <= names
    assert "output of gate" not in names, "routers do not count among the GEMMs"
    assert kept("moe/linear", "full") < kept("moe/linear", "op") < kept("moe/linear")
    linear, full = hybrid.layers[0].attention, hybrid.layers[3].attention
    assert linear.state_bytes(100_000, 2.0) == linear.state_bytes(1, 2.0) == 16 * 128 * 128 * 2
    assert full.state_bytes(100_000, 2.0) == 2 * 4 * 128 * 100_000 * 2


def test_a_step_of_the_hybrid_lies_between_those_of_its_kinds(path: str, tmp_path: Path) -> None:
    files = {}
    for kind in ("linear", "full"):
        files[kind] = tmp_path / f"{kind}.yaml"
        files[kind].write_text(to_yaml(uniform(kind)))
    step, low, high = (moesim.simulate(scenario(str(p))) for p in (path, files["linear"], files["full"]))
    assert low.step.time_s < step.step.time_s < high.step.time_s
    assert low.memory.total_bytes < step.memory.total_bytes < high.memory.total_bytes
    assert low.step.mfu_causal > 0 and step.step.mfu_causal > 0


def test_parts_of_the_hybrid_are_named_by_their_kind(path: str) -> None:
    chosen = "stages.blocks=[embedding moe/linear*3 moe/full, moe/linear*3 moe/full head]"
    prepared = prepare(scenario(path, chosen))
    assert prepared.stages.layers_per_stage == (4, 4)
    assert set(prepared.program.costs.compute) >= {(k, "attn F", "alone") for k in ("moe/full", "moe/linear")}
    with pytest.raises(
        InputError, match=r"'moe' is not a block; write embedding, moe/linear, moe/full, head"
    ):
        prepare(scenario(path, "stages.blocks=[embedding moe, moe head]"))


@pytest.mark.parametrize("policy", RECOMPUTE)
def test_the_planner_prices_both_kinds_as_the_engine_does(path: str, policy: Recompute) -> None:
    own = scenario(path, f"recompute={policy}", "parallel={pp: 2, ep: 8, tp: 2, sequence_parallel: true}")
    pricer = prepare(own).pricer
    book = PlanCosts(pricer.job.with_scenario(own))
    found = book.compute(own.parallel, own.recipe, policy, ("alone",), own.communication.sms)
    for kind in pricer.shape.block_kinds:
        for key, cost in block_compute(pricer, kind, ("alone",)).items():
            assert found[key] == cost, key


def test_trainers_say_that_they_have_no_words_for_it(path: str) -> None:
    spelled = megatron_arguments(scenario(path))
    assert any("attention" in sentence for sentence in spelled.unspelled)
    assert "--num-attention-heads" not in spelled.arguments
