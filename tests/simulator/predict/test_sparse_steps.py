"""Whole models with sparse attention: published totals, simulated steps and a plan search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sparse_kinds import GLM5, M3, V32, v4_flash

from moesim.simulator.model.attention import GQA
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.counts import (
    parameters_activated,
    parameters_mtp,
    parameters_total,
    uncounted_parameters,
)
from moesim.simulator.model.huggingface import to_yaml
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.driver import simulate
from moesim.simulator.scenario import Scenario, load_scenario

V3 = load_model("deepseek-v3")


def shape(name: str, **fields: Any) -> ModelShape:
    """A shape with untied embeddings, of facts in a published config.json."""
    source = {"kind": "published", "reference": "config.json on Hugging Face"}
    return ModelShape.model_validate({"name": name, "source": source, "tied_embeddings": False, **fields})


def v32() -> ModelShape:
    """DeepSeek-V3.2."""
    return V3.model_copy(update={"name": "deepseek-v3.2", "attention": V32})


def v4_pro_attention(ratio: int) -> Any:
    """Attention of DeepSeek-V4-Pro's layers with this compression."""
    more = {"heads": 128, "q_lora_rank": 1536, "o_groups": 16}
    indexer = {"heads": 64, "head_dim": 128, "top_k": 1024} if ratio == 4 else None
    return v4_flash(ratio).model_dump() | more | {"indexer": indexer}


def v4(
    name: str, experts: int, expert_ffn: int, attentions: dict[str, Any], layers: list[str], **more: Any
) -> ModelShape:
    """A shape of DeepSeek-V4's family with four residual streams."""
    moe = {"experts": experts, "top_k": 6, "expert_ffn": expert_ffn, "shared_experts": 1,
           "shared_ffn": expert_ffn, "scoring": "sigmoid", "score_bias": True}  # fmt: skip
    return shape(
        name,
        vocab=129280,
        attentions=attentions,
        attention_layers=layers,
        moe=moe,
        residual_streams=4,
        **more,
    )


FLASH = {"window": v4_flash(0), "csa": v4_flash(4), "hca": v4_flash(128)}
PRO = {"csa": v4_pro_attention(4), "hca": v4_pro_attention(128)}


def v4_flash_model() -> ModelShape:
    """DeepSeek-V4-Flash."""
    pattern = ["window*2", *["csa", "hca"] * 20, "csa"]
    return v4("deepseek-v4-flash", 256, 2048, FLASH, pattern, n_layers=43, hidden=4096)


def v4_pro_model() -> ModelShape:
    """DeepSeek-V4-Pro."""
    return v4("deepseek-v4-pro", 384, 3072, PRO, ["hca", *["hca", "csa"] * 30], n_layers=61, hidden=7168)


def glm5() -> ModelShape:
    """GLM-5."""
    moe = {"experts": 256, "top_k": 8, "expert_ffn": 2048, "shared_experts": 1, "shared_ffn": 2048,
           "scoring": "sigmoid", "score_bias": True, "dense_layers": [0, 1, 2]}  # fmt: skip
    return shape(
        "glm-5",
        n_layers=78,
        hidden=6144,
        vocab=154880,
        attention=GLM5,
        dense_ffn=12288,
        moe=moe,
        mtp_layers=1,
    )


def m3() -> ModelShape:
    """MiniMax-M3 without its vision tower."""
    moe = {"experts": 128, "top_k": 4, "expert_ffn": 3072, "shared_experts": 1, "shared_ffn": 3072,
           "scoring": "sigmoid", "score_bias": True, "dense_layers": [0, 1, 2]}  # fmt: skip
    full = GQA(heads=64, kv_heads=4, head_dim=128, qk_norm=True)
    return shape(
        "minimax-m3", n_layers=60, hidden=6144, vocab=200064, attentions={"full": full, "sparse": M3},
        attention_layers=["full*3", "sparse*57"], dense_ffn=12288, moe=moe,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        (v32(), 671e9, 37e9),  # arXiv 2512.02556; V3's totals, to which the indexer adds 0.9e9
        (glm5(), 744e9, 40e9),  # zai-org/GLM-5 on Hugging Face
        (v4_flash_model(), 284e9, 13e9),  # arXiv 2606.19348
        (v4_pro_model(), 1.6e12, 49e9),  # arXiv 2606.19348, two digits
        (m3(), 428e9, 23e9),  # MiniMaxAI/MiniMax-M3 on Hugging Face
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_parameters_of_whole_models(model: ModelShape, total: float, active: float) -> None:
    rounding = 0.05e12 if total == 1.6e12 else 0.005 * total
    assert parameters_total(model) == pytest.approx(total, abs=rounding)
    counted = [parameters_activated(model, embedding) for embedding in (True, False)]
    index = sum(n * uncounted_parameters(model, kind) for kind, n in model.layer_counts.items())
    head = model.vocab * model.hidden
    counted += [counted[1] - index, counted[1] - head]  # published figures also leave these out
    assert min(abs(n - active) for n in counted) <= max(0.02 * active, 0.55e9), counted


def test_v32_with_its_prediction_module_is_685_billion() -> None:
    """The checkpoint of the MTP module repeats embedding and head."""
    copies = 2 * 129280 * 7168
    assert parameters_total(v32()) + parameters_mtp(v32()) + copies == pytest.approx(685e9, rel=1e-3)


def scenario(model: Path, *more: str) -> Scenario:
    """256 H200 with a model."""
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            f"model={model}",
            "cluster={node: hgx-h200, nodes: 32, network: mpft-ib-400g, price_per_gpu_hour: $2.5/h}",
            "profile=h200-8gpu",
            "parallel={tp: 1, pp: 4, ep: 64, cp: 1, microbatch: 1, zero_stage: 1}",
            "schedule=1f1b",
            "batch.sequences=256",
            *more,
        ],
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model files by name."""
    folder, out = tmp_path_factory.mktemp("models"), {}
    for model in (v32(), v4_flash_model(), m3(), V3):
        out[model.name] = folder / f"{model.name}.yaml"
        out[model.name].write_text(to_yaml(model))
        assert load_model(out[model.name]) == model
    return out


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4-flash", "minimax-m3"])
@pytest.mark.parametrize("profile", ["h200-8gpu", "generic-roofline"])
def test_a_step_lies_between_its_bounds_and_says_what_is_assumed(
    files: dict[str, Path], name: str, profile: str
) -> None:
    more = () if name == "deepseek-v3.2" else ("precision=bf16",)
    result = simulate(scenario(files[name], f"profile={profile}", *more))
    step = result.step
    assert 0 < step.lower_bound_s <= step.time_s <= step.upper_bound_s
    told = " ".join(result.extrapolated)
    assert "sparse_attention_backward" in told, "the backward's rate is an assumption"
    forward_assumed = "sparse_attention_forward" in told
    measured = profile == "h200-8gpu" and name != "minimax-m3"
    assert forward_assumed != measured
    assert not [note for note in result.extrapolated if "index_topk" in note]


@pytest.mark.parametrize(
    ("profile", "node"),
    [("h800-trace", "hgx-h800"), ("h800-from-h200", "hgx-h800"), ("h100-products", "hgx-h100")],
)
@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4-flash"])
def test_profiles_of_other_hoppers_price_it(
    files: dict[str, Path], name: str, profile: str, node: str
) -> None:
    cluster = f"cluster={{node: {node}, nodes: 32, network: mpft-ib-400g, price_per_gpu_hour: $2.5/h}}"
    step = simulate(scenario(files[name], cluster, f"profile={profile}", "precision=bf16")).step
    assert 0 < step.lower_bound_s <= step.time_s <= step.upper_bound_s


def test_sparse_attention_pays_at_long_sequences_only(files: dict[str, Path]) -> None:
    times = {}
    for sequence, sequences, cp in ((4096, 256, 1), (131072, 64, 16)):
        parallel = f"parallel={{tp: 1, pp: 4, ep: 64, cp: {cp}, microbatch: 1, zero_stage: 1}}"
        for name in ("deepseek-v3", "deepseek-v3.2"):
            length = (f"batch.sequence_length={sequence}", f"batch.sequences={sequences}", parallel)
            times[name, sequence] = simulate(scenario(files[name], *length)).step.time_s
    assert times["deepseek-v3.2", 4096] > times["deepseek-v3", 4096], "dense attention is short here"
    assert times["deepseek-v3.2", 131072] < 0.5 * times["deepseek-v3", 131072]


def test_a_plan_search_runs_with_sparse_attention(files: dict[str, Path]) -> None:
    space = PlanSpace(
        tp=(1,), pp=(4, 8), ep=(32, 64), cp=(1,), vpp=(1,), microbatch=(1,), schedule=("1f1b",),
        recompute=("selective", "full"), precision=("bf16",), sms=(20,), zero_stage=(1,),
    )  # fmt: skip
    found = plan(scenario(files["deepseek-v4-flash"], "precision=bf16"), space, top=2, workers=1)
    assert found.best.time_s == simulate(found.best.scenario).step.time_s
    assert found.best.memory_bytes <= found.best.capacity_bytes


def test_streams_multiply_what_pipeline_ranks_send(files: dict[str, Path], tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text(to_yaml(v4_flash_model().model_copy(update={"residual_streams": 1})))
    four, one = (simulate(scenario(path, "precision=bf16")) for path in (files["deepseek-v4-flash"], plain))
    assert four.memory.total_bytes > one.memory.total_bytes
    assert four.step.time_s > one.step.time_s
