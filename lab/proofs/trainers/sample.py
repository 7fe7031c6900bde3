"""Seeded random plans for the models that training frameworks ship; each can be run by the trainer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.rules import PlanFacts, facts_of

PER_MODEL = 8
"""Plans of each model."""


def _model(
    name: str, layers: int, hidden: int, vocab: int, attention: dict[str, Any], **rest: Any
) -> dict[str, Any]:
    source = {"kind": "published", "reference": "torchtitan 0.2.2, torchtitan/models", "date": "2026-11-22"}
    sizes = {"n_layers": layers, "hidden": hidden, "vocab": vocab, "tied_embeddings": False}
    return {"name": name, "source": source, **sizes, "attention": attention, **rest}


def _gqa(heads: int, kv_heads: int, qk_norm: bool = False) -> dict[str, Any]:
    return {"kind": "gqa", "heads": heads, "kv_heads": kv_heads, "head_dim": 128, "qk_norm": qk_norm}


def _mla(heads: int, q_lora_rank: int | None) -> dict[str, Any]:
    ranks = {"q_lora_rank": q_lora_rank, "kv_lora_rank": 512}
    return {"kind": "mla", "heads": heads, **ranks, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128}


def _moe(experts: int, top_k: int, width: int, shared: int, dense: list[int], scoring: str) -> dict[str, Any]:
    moe = {"experts": experts, "top_k": top_k, "expert_ffn": width, "scoring": scoring, "dense_layers": dense}
    return moe | ({"shared_experts": shared, "shared_ffn": width} if shared else {})


_EVEN = list(range(0, 48, 2))

MODELS: dict[str, str | dict[str, Any]] = {
    "llama3-8b": "llama-3-8b",
    "llama3-70b": "llama-3-70b",
    "llama3-405b": _model("llama-3-405b", 126, 16384, 128256, _gqa(128, 8), dense_ffn=53248),
    "llama4-17bx16e": _model(
        "llama-4-scout", 48, 5120, 202048, _gqa(40, 8), moe=_moe(16, 1, 8192, 1, [], "sigmoid")
    ),
    "llama4-17bx128e": _model(
        "llama-4-maverick",
        *(48, 5120, 202048, _gqa(40, 8)),
        dense_ffn=16384,
        moe=_moe(128, 1, 8192, 1, _EVEN, "sigmoid"),
    ),
    "deepseek-v3-16b": _model(
        "deepseek-moe-16b",
        *(27, 2048, 102400, _mla(16, None)),
        dense_ffn=10944,
        moe=_moe(64, 6, 1408, 2, [0], "softmax"),
    ),
    "deepseek-v3-236b": _model(
        "deepseek-v2",
        *(60, 5120, 102400, _mla(128, 1536)),
        dense_ffn=12288,
        moe=_moe(160, 6, 1536, 2, [0], "softmax")
        | {"groups": 8, "groups_per_token": 3, "group_score": "best"},
    ),
    "deepseek-v3-671b": _model(
        "deepseek-v3-without-mtp",
        *(61, 7168, 129280, _mla(128, 1536)),
        dense_ffn=18432,
        moe=_moe(256, 8, 2048, 1, [0, 1, 2], "sigmoid")
        | {"groups": 8, "groups_per_token": 4, "group_score": "top2-sum", "score_bias": True},
    ),
    "qwen3-8b": _model("qwen3-8b", 36, 4096, 151936, _gqa(32, 8, qk_norm=True), dense_ffn=12288),
    "qwen3-32b": _model("qwen3-32b", 64, 5120, 151936, _gqa(64, 8, qk_norm=True), dense_ffn=25600),
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
}
"""Models by name of the sample: a shipped model, or a shape."""

_FP8 = {"linear": "fp8", "scaling": "tensor"}


def draw_plans(
    seed: int,
    problems: Callable[[PlanFacts], tuple[str, ...]],
    per_model: int = PER_MODEL,
    communication: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and scenario data of plans that a trainer can run, `per_model` of each model that has any.

    A model of which 2,000 draws give no further plan has fewer. `communication` is the section of all plans.
    """
    for model, shape in MODELS.items():
        generator = random.Random(f"{seed} {model}")
        count = 0
        for _ in range(2000):
            scenario = _draw(generator, model, shape)
            if scenario is not None and communication:
                scenario = scenario.replace(communication=dict(communication))
            if scenario is None or problems(facts_of(scenario)):
                continue
            count += 1
            further = {"communication": dict(communication)} if communication else {}
            yield f"{model}-{count:02d}", _data(scenario) | further
            if count == per_model:
                break


def _data(scenario: Scenario) -> dict[str, Any]:
    """What the draw decided, without the model, which `MODELS` has."""
    data = scenario.to_dict()
    kept = {key: data[key] for key in ("profile", "precision", "parallel", "schedule", "recompute", "batch")}
    layers = scenario.stages.layers
    cluster = {"accelerator": "h100-sxm", "nodes": scenario.machine.nodes}
    return {"cluster": cluster, **kept} | ({} if layers is None else {"stages": {"layers": list(layers)}})


def build(name: str, data: Mapping[str, Any]) -> Scenario:
    """The scenario of one entry of the sample."""
    model = name.rpartition("-")[0]
    given = {"name": model, "model": MODELS[model], "software": {"framework": "none"}}
    return Scenario.model_validate({**given, **data})


def _draw(generator: random.Random, name: str, model: str | dict[str, Any]) -> Scenario | None:
    """One random scenario, or None where its degrees, stages or batch do not fit."""
    choose = generator.choice
    pp = choose([1, 2, 2, 4, 4, 4, 8, 8, 16])
    schedule = choose([s for s in SCHEDULES if pp > 1 or s == "1f1b"])
    spec = SCHEDULES[schedule]
    tp = choose([1, 1, 2, 4, 8])
    parallel = {
        "tp": tp,
        "pp": pp,
        "cp": choose([1, 1, 2]),
        "ep": choose([1, 2, 4, 8, 16, 32, 64]),
        "vpp": choose([2, 3]) if spec.free_vpp else 1,
        "microbatch": choose([1, 1, 2]),
        "zero_stage": choose([0, 1, 2, 3]),
        "sequence_parallel": tp > 1,
        "expert_tp": choose([1, tp]),
    }
    nodes, rounds = choose([1, 2, 8, 32, 128]), choose([1, 2, 3, 4])
    divides = 8 * nodes % (tp * parallel["cp"] * pp) == 0
    if not divides or 8 * nodes // pp % (parallel["ep"] * parallel["expert_tp"]):
        return None  # found out early, because a scenario takes long to build
    replicas = nodes * 8 // (tp * parallel["cp"] * pp)
    data = {
        "name": name,
        "model": model,
        "cluster": {"accelerator": "h100-sxm", "nodes": nodes},
        "profile": "h100-layers",
        "precision": choose(["bf16", "bf16", "bf16", _FP8]),
        "parallel": parallel,
        "schedule": schedule,
        "software": {"framework": "none"},
        "recompute": choose(["none", "attention", "selective", "op", "full"]),
        "batch": {
            "sequences": max(
                1, replicas * parallel["microbatch"] * (rounds * max(2 * pp, 1) if pp > 1 else rounds)
            ),
            "sequence_length": choose([2048, 4096, 8192]),
        },
    }
    try:
        scenario = Scenario.model_validate(data)
        shape, plan = scenario.shape, scenario.parallel
        layout = Layout(plan, scenario.machine.n_gpus, 8)
        stages = pp * plan.vpp * (2 if schedule in ("zbv", "dualpipev") else 1)
        check_against_model(plan, shape, scenario.batch.sequence_length, stages)
        spec.check(pp, microbatches(layout, scenario.batch.sequences), plan.vpp)
        if pp == 1:
            return scenario
        return scenario.replace(stages={"layers": _layers(generator, shape.n_layers, stages)})
    except InputError:
        return None


def _layers(generator: random.Random, layers: int, stages: int) -> list[int]:
    """Nearly equal stages, in random order."""
    sizes = [layers // stages + (n < layers % stages) for n in range(stages)]
    generator.shuffle(sizes)
    return sizes
