"""Operators of a step, their prices, and the load of the experts."""

from __future__ import annotations

import pytest

from moesim.hwmodels.accelerator import list_accelerators, load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import Operator
from moesim.simulator.serving.attention import attention_operators, cache_row_bytes
from moesim.simulator.serving.linear import product
from moesim.simulator.serving.operators import (
    ExpertLoad,
    Split,
    StepRows,
    cache_bytes_per_token,
    draft_operators,
    experts,
    most_loaded,
    router,
    step_operators,
)
from moesim.simulator.serving.prices import eager_seconds, law_of, laws, price
from moesim.simulator.serving.scheduler import StepBatch

H200 = load_accelerator("h200-sxm")


def named(model: str, rows: StepRows, split: Split) -> dict[str, Operator]:
    """The attention of a model's last layer by operator."""
    shape = load_model(model)
    return {op.name: op for op in attention_operators(shape.layers[-1].attention, shape.hidden, rows, split)}


def test_latent_attention_decodes_absorbed_and_prefills_per_head() -> None:
    ops = named("deepseek-v3", StepRows.of(StepBatch(4, 4000, 1, 100, 5050)), Split(tp=2))
    decode, prefill = ops["decode"], ops["prefill"]
    assert decode.flop == pytest.approx(2 * 64 * 4000 * (576 + 512))
    assert decode.bytes_read == pytest.approx(4000 * 576 * 2 + 4 * 64 * 576 * 2)
    assert prefill.flop == pytest.approx(2 * 64 * 5050 * (192 + 128))
    assert ops["kv_up"].flop == pytest.approx(2 * 100 * 64 * 256 * 512)
    assert ops["o_proj"].flop == pytest.approx(2 * 104 * 64 * 128 * 7168)


def test_a_window_and_a_choice_limit_the_keys() -> None:
    decodes = StepRows.of(StepBatch(2, 20_000, 0, 0, 0))
    assert decodes.decode_keys() == 20_000 and decodes.decode_keys(128) == 256
    assert named("deepseek-v3.2", decodes, Split())["decode"].flop == pytest.approx(2 * 128 * 4096 * 1088)
    prompt = StepRows.of(StepBatch(0, 0, 1, 100, 100 * 1000 + 5050))  # 100 tokens behind 1,000
    assert prompt.keys_formed == pytest.approx(1100)
    assert prompt.prefill_keys(50) == pytest.approx(100 * 50)
    assert prompt.prefill_keys() == pytest.approx(prompt.pairs, rel=1e-3)


def test_short_prompts_of_sparse_attention_run_dense_and_shared_choices_have_no_indexer() -> None:
    short = named("deepseek-v3.2", StepRows.of(StepBatch(0, 0, 1, 1024, 1024 * 1025 // 2)), Split())
    assert "kv_up" in short and "indexer.scores" not in short
    long = named("deepseek-v3.2", StepRows.of(StepBatch(0, 0, 1, 4096, 4096 * 4097 // 2)), Split())
    assert "q_absorb" in long and long["indexer.scores"].flop == pytest.approx(64 * 128 * 4096**2, rel=1e-3)
    assert "indexer.scores" not in named("glm-5.2", StepRows.of(StepBatch(4, 40_000, 0, 0, 0)), Split())


def test_cache_rows_hold_latents_on_every_rank_and_heads_on_one() -> None:
    mla, gqa = load_model("deepseek-v3"), load_model("llama-3-8b")
    assert cache_bytes_per_token(mla, Split(tp=8)) == 61 * 576 * 2
    assert cache_bytes_per_token(gqa, Split(tp=8)) == 32 * 2 * 128 * 2
    assert cache_row_bytes(gqa.layers[0].attention, Split(tp=16)) == 2 * 128 * 2
    with pytest.raises(InputError, match="serving knows"):
        cache_bytes_per_token(load_model("minimax-m1"), Split())


def test_a_step_has_each_kind_of_layer_once_and_drafts_one_more() -> None:
    shape, split = load_model("deepseek-v3"), Split(ep=32, weights="fp8", experts="fp8", kernels="deepgemm")
    rows = StepRows.of(StepBatch(8, 8000, 0, 0, 0))
    load = ExpertLoad.of(shape.moe, split, 8.0 * 32)
    sections = step_operators(shape, rows, split, load)
    assert [(s.layer, s.part, s.layers) for s in sections if s.part == "attention"] == [
        ("dense", "attention", 3), ("moe", "attention", 58),
    ]  # fmt: skip
    routed = next(s for s in sections if s.part == "experts")
    assert [op.name for op in routed.operators] == ["experts.gate_up", "experts.act", "experts.down"]
    assert routed.operators[0].flop == pytest.approx(2 * 64 * 4096 * 7168)
    assert {s.part for s in draft_operators(shape, rows, split, load)} >= {"attention", "experts", "head"}


def test_a_router_writes_an_index_and_a_weight_a_choice() -> None:
    moe = load_model("deepseek-v3").moe
    assert moe is not None
    choice = router(moe, 7168, 10.0)[1]
    assert (choice.bytes_read, choice.bytes_written) == (10 * 256 * 4, 10 * 8 * (4 + 4))


def test_the_most_loaded_rank_of_a_power_law_has_more_rows_on_fewer_experts() -> None:
    rows, active = most_loaded(256, 8, 32, 4096.0, 1.2)
    assert rows > 1.5 * 4096 * 8 / 32 and 1 <= active <= 8
    assert most_loaded(256, 8, 1, 4096.0, 1.2)[0] == pytest.approx(4096 * 8, rel=0.02)
    moe = load_model("deepseek-v3").moe
    even = ExpertLoad.of(moe, Split(ep=32), 4096.0)
    assert even.rows == 1024 and even.active == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize(
    ("kernels", "tokens", "measured_us"),  # lab/results/2026-11-26-h100-serving-experts.json.xz, TP8, "all"
    [("marlin", 8.0, 48.2), ("marlin", 512.0, 200.2), ("triton", 8.0, 77.3), ("triton", 512.0, 212.2)],
)
def test_experts_of_mxfp4_take_what_their_kernels_took(
    kernels: str, tokens: float, measured_us: float
) -> None:
    moe, h100 = load_model("gpt-oss-120b").moe, load_accelerator("h100-sxm")
    assert moe is not None
    split = Split(tp=8, expert_tp=8, experts="mxfp4", kernels=kernels)
    ops = experts(moe, 2880, ExpertLoad.of(moe, split, tokens), split, decode=True)
    if kernels == "triton":  # measured with the choice of experts
        ops += router(moe, 2880, tokens)[1:]
    assert sum(price(op, h100).seconds for op in ops) * 1e6 == pytest.approx(measured_us, rel=0.12)
    up = next(op for op in ops if op.name == "experts.gate_up").gemm
    assert up is not None and (up.n, up.k) == ((768, 3072) if kernels == "marlin" else (768, 2880))


def test_weights_carry_their_scales_and_narrow_formats_are_widened() -> None:
    op = product("product", 1.0, 4096, 7168, "mxfp4")
    assert op.bytes_read == pytest.approx(7168 * 2 + 4096 * 7168 * (0.5 + 1 / 32))
    assert "multiplied in bf16" in price(op, H200).assumptions[0]
    assert price(op, H200).seconds < price(product("product", 1.0, 4096, 7168, "bf16"), H200).seconds


def test_a_price_is_a_call_then_bytes_or_flops() -> None:
    law = laws()["gemm-fp8"]
    small, large = (product("product", m, 4096, 7168, "fp8") for m in (1.0, 65536.0))
    call_s = law.call_us * 1e-6 + 7168 * law.depth_ns * 1e-9
    moved = small.bytes_read + small.bytes_written
    assert price(small, H200).seconds == pytest.approx(call_s + moved / 4.8e12 / law.bandwidth)
    rate = law.peak * 1979e12 / (1 + law.edge / 65536)
    assert price(large, H200).seconds == pytest.approx(call_s + large.flop / rate)
    assert price(small, H200).bound != "compute" and price(large, H200).bound == "compute"
    slower = load_accelerator("h100-sxm")
    assert any("scaled to h100-sxm" in note for note in price(small, slower).assumptions)


def test_every_card_is_priced_and_a_profile_may_bring_its_own_laws() -> None:
    op = product("product", 64.0, 4096, 4096, "bf16")
    for card in map(load_accelerator, list_accelerators()):
        if "bf16" not in card.peak:
            continue
        cost = price(op, card)
        assert 0 < cost.best_seconds <= cost.seconds <= cost.worst_seconds
    own = load_profile("h200-measured")
    law = law_of(op, laws()).model_copy(update={"call_us": 500.0})
    assert price(op, H200, own.model_copy(update={"kernel_laws": (law,)})).seconds > 500e-6
    assert eager_seconds("mla", 0.0) < eager_seconds("mla", 1e-3)
