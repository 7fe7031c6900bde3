"""Recompute by modules: what each one frees, what it runs again, and what a list costs in a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.cost_table import block_compute
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.transfers import block_transfers
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.job import resolve
from moesim.simulator.memory.activations import activation_bytes, cached_tensors
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import MODULES, Module, Recompute, parse_recompute, recompute_label
from moesim.simulator.model.repeated import check_recompute, checkpoints
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.parallel import ParallelPlan

V3 = load_model("deepseek-v3")
QWEN = load_model("qwen3-30b-a3b")
LLAMA = load_model("llama-3-8b")
BF16 = PRECISIONS["bf16"]

FREED: dict[tuple[str, Module], set[str]] = {
    ("moe", "core_attn"): {"log-sum-exp"},
    ("moe", "layernorm"): {"attention input", "FFN input"},
    ("moe", "mla_up_proj"): {"normalised latents", "q, k, v"},
    ("moe", "moe_act"): {"experts SwiGLU output"},
    ("moe", "mlp"): set(),
    ("dense", "mlp"): {"FFN gate and up", "FFN SwiGLU output"},
    ("dense", "moe"): set(),
    ("moe", "shared_experts"): {"shared experts gate and up", "shared experts SwiGLU output"},
    ("moe", "moe"): {
        "gate scores", "chosen experts and weights", "dispatched rows", "experts gate and up",
        "experts SwiGLU output", "shared experts gate and up", "shared experts SwiGLU output",
    },
}  # fmt: skip
"""Tensors of a DeepSeek-V3 layer that each module's recompute frees."""


def kept(kind: str, policy: Recompute, software: Software | None = None) -> float:
    return activation_bytes(V3, kind, BF16, policy, ParallelPlan(), 4096, software or Software())


@pytest.mark.parametrize(("kind", "module"), FREED)
def test_a_module_frees_its_tensors(kind: str, module: Module) -> None:
    everything = cached_tensors(V3, kind, BF16, "none")
    left = {t.name for t in cached_tensors(V3, kind, BF16, (module,))}
    assert {t.name for t in everything} - left == FREED[kind, module]
    size = sum(t.bytes_per_token for t in everything if t.name in FREED[kind, module])
    assert kept(kind, "none") - kept(kind, (module,)) == pytest.approx(4096 * size, rel=1e-12)


def test_the_core_attention_is_the_policy_attention_where_scores_go_through_memory() -> None:
    unfused = Software(attention="unfused", dropout=True)
    assert kept("moe", ("core_attn",), unfused) == kept("moe", "attention", unfused)
    assert kept("moe", ("core_attn",), unfused) < kept("moe", "none", unfused)
    listed, policy = (
        operators("moe", recompute=r, unfused_attention=True) for r in (("core_attn",), "attention")
    )
    assert listed == policy


def operators(kind: str, shape: Any = V3, **more: Any) -> list[Operator]:
    found = block_operators(shape, kind, BF16, tokens=4096, sequence=4096, received_rows=32768.0, **more)
    return [op for ops in found.values() for op in ops]


def again(kind: str, *modules: Module) -> list[str]:
    return [op.name.removesuffix(".recompute") for op in operators(kind, recompute=modules) if op.recompute]


def test_each_module_runs_its_operators_again() -> None:
    assert again("moe", "core_attn") == ["attention"]
    assert sorted(again("moe", "layernorm")) == ["attn_norm", "ffn_norm"]
    assert {"q_norm", "kv_norm", "q_up", "kv_up", "rope_q", "rope_k"} <= set(again("moe", "mla_up_proj"))
    assert again("moe", "moe_act") == ["experts.swiglu"]
    assert again("moe", "mlp") == [] == again("dense", "moe")
    assert again("dense", "mlp") == ["ffn.gate_up", "ffn.swiglu", "ffn.down"]
    assert again("moe", "shared_experts") == ["shared.gate_up", "shared.swiglu", "shared.down"]
    forward = block_operators(V3, "moe", BF16, tokens=4096, sequence=4096, received_rows=32768.0)["mlp F"]
    whole = again("moe", "moe")
    assert [name for name in whole if name in {op.name for op in forward}] == [op.name for op in forward]
    assert "gate" in whole and not {"q_up", "attention"} & set(whole)


# -- prices and steps ---------------------------------------------------------------------------------


def small(*more: str) -> Scenario:
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            "name=small", "model=qwen3-30b-a3b",
            "cluster={node: hgx-h200, nodes: 4, network: mrft-ib-400g, price_per_gpu_hour: $2.5/h}",
            "profile=h200-measured", "precision=bf16", "parallel={pp: 4, ep: 8, zero_stage: 1}",
            "schedule=1f1b", "batch.sequences=128", "run.tokens=1e11", *more,
        ],
    )  # fmt: skip


def exact(*more: str) -> Scenario:
    """Without differences between ranks, so that seconds of phases add up."""
    return small("variation={clock_cv: 0, jitter_cv: 0}", "routing.expert_load_cv=0", *more)


def seconds(pricer: Pricer, phase: Phase) -> float:
    cost = block_compute(pricer, "moe", ("alone",))["moe", phase, "alone"]
    return cost.fixed_s + cost.row_s


def test_the_layer_again_takes_its_forward_with_its_transfers() -> None:
    plain, whole = (Pricer(resolve(small(f"recompute={r}"))) for r in ("none", "moe"))
    moved = block_transfers(plain, "moe", ("alone",))
    transfers = [moved["moe", phase, "alone"] for phase in ("dispatch F", "combine F")]
    router = plain.operators("moe")["attn F"]
    place = next(n for n, op in enumerate(router) if op.name == "gate")
    gate_s = sum(cost.seconds for cost in plain.operator_costs("moe", "attn F", "alone")[place:])
    prepared_s = sum(cost.seconds for cost in plain.operator_costs("moe", "dispatch F", "alone"))
    forward_s = (
        seconds(plain, "mlp F") + gate_s + prepared_s + sum(t.launch_s + t.payload_s for t in transfers)
    )
    assert seconds(whole, "mlp I") - seconds(plain, "mlp I") == pytest.approx(forward_s, rel=1e-9)
    assert seconds(whole, "attn I") == seconds(plain, "attn I")


@pytest.mark.parametrize(
    ("module", "phase", "split"),
    [
        ("core_attn", "attn I", "parallel={pp: 2, ep: 8, cp: 2, zero_stage: 1}"),
        ("moe", "mlp I", "parallel={pp: 2, ep: 8, expert_tp: 2, zero_stage: 1}"),
    ],
)
def test_collectives_inside_a_module_run_again(module: str, phase: str, split: str) -> None:
    def exposed(recompute: str) -> float:
        pricer = Pricer(resolve(small(split, f"recompute={recompute}")))
        return block_compute(pricer, "moe", ("alone",))["moe", phase, "alone"].exposed_s  # type: ignore[index]

    again_s = exposed(module) - exposed("none")
    assert again_s > 0.0
    assert exposed("layernorm") == exposed("none")


def test_tensor_parallel_collectives_of_a_dense_ffn_run_again_with_it() -> None:
    def exposed(recompute: str) -> float:
        split = "parallel={tp: 4, pp: 2, zero_stage: 1, sequence_parallel: true}"
        pricer = Pricer(resolve(small("model=llama-3-8b", split, f"recompute={recompute}")))
        return block_compute(pricer, "dense", ("alone",))["dense", "mlp I", "alone"].exposed_s

    assert exposed("mlp") == pytest.approx(2 * exposed("none"), rel=1e-9)


@cache
def simulated(recompute: str, *more: str) -> tuple[float, float]:
    result = moesim.simulate(exact(f"recompute={recompute}", *more))
    return result.step.time_s, result.memory.total_bytes


def test_every_module_makes_a_step_longer_and_its_memory_smaller() -> None:
    time_s, size = simulated("none")
    for module in ("core_attn", "layernorm", "moe_act", "moe"):
        longer_s, smaller = simulated(module)
        assert longer_s > time_s and smaller < size, module
    most = "core_attn+layernorm+moe"
    assert simulated(most)[0] < simulated("full")[0] and simulated(most)[1] > simulated("full")[1]


@pytest.mark.parametrize("recompute", [("layernorm", "moe_act"), ("core_attn", "moe"), ("moe",)])
def test_the_planner_prices_a_list_as_the_engine_does(recompute: tuple[Module, ...]) -> None:
    own = small("parallel={pp: 2, ep: 8, tp: 2, sequence_parallel: true}").replace(recompute=recompute)
    pricer = prepare(own).pricer
    book = PlanCosts(pricer.job.with_scenario(own))
    found = book.compute(own.parallel, own.recipe, recompute, ("alone",), own.communication.sms)
    for kind in pricer.shape.block_kinds:
        for key, cost in block_compute(pricer, kind, ("alone",)).items():
            assert found[key] == cost, key


@pytest.mark.parametrize("choice", ["layernorm+moe_act", ["moe", "core_attn"]])
def test_a_search_takes_lists_beside_policies(choice: Any) -> None:
    """Closed form, bounds and memory of plans with lists hold against the engine."""
    space = PlanSpace(
        tp=(1,), pp=(2, 4), ep=(8,), cp=(1,), vpp=(1,), microbatch=(1,), zero_stage=(1,), sms=(8, 32),
        schedule=("1f1b", "dualpipev"), recompute=(choice,), precision=("bf16",),
    )  # fmt: skip
    found = plan(exact(), space, top=4, workers=1)
    assert {row.recompute for row in found.ranked} == {recompute_label(parse_recompute(choice))}
    for row in found.ranked:
        assert row.lower_bound_s is not None and row.closed_form_s is not None
        assert row.lower_bound_s <= row.time_s + 1e-6, row.label
        assert row.closed_form_s == pytest.approx(row.time_s, rel=0.03), row.label
        repeated = moesim.simulate(row.scenario)
        assert (repeated.step.time_s, repeated.memory.total_bytes) == (row.time_s, row.memory_bytes)


# -- words --------------------------------------------------------------------------------------------


def test_names_are_read_and_written_as_in_a_file() -> None:
    own = small("recompute=[moe_act, layernorm, moe_act]")
    assert own.recompute == ("layernorm", "moe_act")
    assert own.to_dict()["recompute"] == ["layernorm", "moe_act"]
    assert Scenario.model_validate(own.to_dict()).recompute == own.recompute
    assert (
        recompute_label(own.recompute)
        == "layernorm+moe_act"
        == recompute_label(parse_recompute("moe_act+layernorm"))
    )
    assert small("recompute=moe").recompute == ("moe",)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ful", r"'ful' is not one of none, .*nearest: 'full'"),
        ("[moe_acts]", "'moe_acts' is not one of core_attn, .*nearest: 'moe_act'"),
        ("[]", "write none"),
        ("[full]", "the module 'full' is not one of"),
        ("3", "neither a policy"),
        ("[[moe]]", "is not one of"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(value: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        small(f"recompute={value}")


def test_modules_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(InputError, match=r"mla_up_proj; it has core_attn, layernorm, moe_act, moe$"):
        check_recompute(QWEN, ("layernorm", "mla_up_proj"))
    with pytest.raises(InputError, match="no module moe; it has core_attn, layernorm, mlp"):
        check_recompute(LLAMA, ("moe",))
    with pytest.raises(InputError, match="mla_up_proj"):
        prepare(small("recompute=mla_up_proj"))
    with pytest.raises(InputError, match="mla_up_proj"):
        plan(small(), PlanSpace(recompute=(("mla_up_proj",),)), top=1, workers=1)
    check_recompute(V3, MODULES)


def test_a_space_refuses_modules_outside_a_list() -> None:
    with pytest.raises(ValueError, match=r"\[\[layernorm\]\]"):
        PlanSpace(recompute=["layernorm", "moe_act"])


def test_a_layer_has_a_checkpoint_for_each_module_and_both_norms() -> None:
    block = V3.block("moe")
    assert [checkpoints(block, r) for r in ("none", "selective", "full")] == [0, 0, 1]
    assert checkpoints(block, ("layernorm", "mlp", "moe_act")) == 3
    assert checkpoints(V3.block("head"), MODULES) == 0
