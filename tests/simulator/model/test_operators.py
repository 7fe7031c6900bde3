from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention import DSA, GQA, Compressed, Mamba, SlidingAttention
from moesim.simulator.model.attention.recurrent import RecurrentMixer
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.counts import block_parameters, flop_per_token
from moesim.simulator.model.feed_forward.dense import DenseFFN
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.operators import (
    RECOMPUTE,
    block_operators,
    expected_received_tokens,
    model_flop,
    optimizer_operators,
)
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.shape import ModelShape

V3 = load_model("deepseek-v3")
LLAMA = load_model("llama-3-8b")
FP8, BF16 = PRECISIONS["fp8"], PRECISIONS["bf16"]
TOKENS = 4096


def blocks(
    shape: ModelShape, kind: BlockKind, precision: str = "fp8", **more: Any
) -> dict[Phase, tuple[Operator, ...]]:
    settings_: dict[str, Any] = {"tokens": TOKENS, "sequence": TOKENS, "ep": 64, "received_rows": 32768.0}
    return block_operators(shape, kind, PRECISIONS[precision], **{**settings_, **more})


def everything(phases: dict[Phase, tuple[Operator, ...]]) -> list[Operator]:
    return [op for operators in phases.values() for op in operators]


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_v3_reproduces_the_published_flop_per_token(precision: str, recompute: str) -> None:
    layers: list[tuple[BlockKind, int]] = [("moe", 58), ("dense", 3), ("head", 1)]
    total = sum(
        count * model_flop(everything(blocks(V3, kind, precision, recompute=recompute)))
        for kind, count in layers
    )
    assert total / TOKENS == pytest.approx(249.8e9, rel=2e-4)


EVERY = [(name, kind) for name in shipped_models() for kind in load_model(name).layer_counts]


def nominal(shape: ModelShape, kind: BlockKind, **more: Any) -> list[Operator]:
    """Operators of a block whose GPU holds all experts."""
    rows = TOKENS * (shape.moe.routed_rows if shape.moe else 0.0)
    return everything(blocks(shape, kind, "bf16", ep=1, received_rows=rows, **more))


@pytest.mark.parametrize("name", shipped_models())
def test_operators_do_the_model_flops(name: str) -> None:
    shape = load_model(name)
    counts = (*shape.layer_counts.items(), ("head", 1))
    for software in ({}, {"unfused_attention": True}, {"flex_attention": True}):
        total = sum(n * model_flop(nominal(shape, kind, **software)) for kind, n in counts)
        assert total / TOKENS == pytest.approx(flop_per_token(shape, TOKENS, causal=True), rel=2e-3), software


def vectors(shape: ModelShape, kind: BlockKind) -> int:
    """Parameters of a layer's halves, norms left out, that are part of no GEMM."""
    layer, h = shape.block(kind).layer, shape.hidden
    assert layer is not None
    count, a, moe = 0, layer.attention, layer.feed_forward
    if isinstance(moe, MoE):
        biases = moe.experts * moe.expert_bias * (moe.branches * moe.expert_ffn + h)
        count += biases + moe.scored * (moe.router_bias + moe.score_bias) + h * moe.shared_gate
    else:
        plain = replace(moe, bias=False) if isinstance(moe, DenseFFN) else moe
        count += moe.parameters(h, False).total - plain.parameters(h, False).total
    if isinstance(a, GQA | SlidingAttention):
        plain_attention = a.model_copy(update={"qkv_bias": False, "o_bias": False})
        count += a.parameters(h) - plain_attention.parameters(h)
    elif isinstance(a, DSA):
        count += 0 if a.indexer.shared else 2 * a.indexer.head_dim  # the layer norm of the key
    elif isinstance(a, Compressed):  # sinks and position biases
        widths = a.head_dim * (2 if a.indexer else 1) + (2 * a.indexer.head_dim if a.indexer else 0)
        count += a.heads + a.ratio * widths
    elif isinstance(a, RecurrentMixer):
        count += a.uncounted_parameters(h) + (a.inner if isinstance(a, Mamba) else 0)
    return count


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_weight_gradients_touch_every_matrix_parameter_once(name: str, kind: BlockKind) -> None:
    shape = load_model(name)
    found = [op.gemm for op in nominal(shape, kind) if op.direction == "W" and op.gemm is not None]
    parts = block_parameters(shape, kind)
    assert sum(g.m * g.n * g.groups for g in found) == parts.total - parts.norms - vectors(shape, kind)


def test_kernel_counts_per_phase_are_those_of_the_published_profile() -> None:
    counts = {phase: sum(op.launches for op in ops) for phase, ops in blocks(V3, "moe").items()}
    # deepseek-ai/profile-data@449602428a1b train.json, kernels a layer on the compute streams
    assert counts == {
        "attn F": 69, "mlp I": 29, "mlp W": 12, "mlp F": 20, "attn I": 101, "attn W": 5,
        "dispatch F": 1, "combine B": 1, "combine F": 0, "dispatch B": 0,
    }  # fmt: skip


def test_phases_are_known_and_communication_ones_appear_with_expert_parallelism_only() -> None:
    assert set(blocks(V3, "moe")) <= set(get_args(Phase))
    exchanges = {"dispatch F", "combine F", "combine B", "dispatch B"}
    assert set(blocks(V3, "moe")) - set(blocks(V3, "moe", ep=1)) == exchanges
    assert set(blocks(V3, "moe", ep=1)) == set(blocks(V3, "dense"))
    assert set(blocks(V3, "embedding")) == {"mlp F", "mlp W"}
    assert set(blocks(V3, "head")) == {"mlp F", "mlp I", "mlp W"}


@pytest.mark.parametrize("kind", ["dense", "moe", "mtp"])
def test_bf16_has_no_casts_and_no_weight_transposes(kind: BlockKind) -> None:
    classes = {op.cls for op in everything(blocks(V3, kind, "bf16"))}
    assert not classes & {"cast", "transpose"}
    assert {"cast", "transpose"} <= {op.cls for op in everything(blocks(V3, kind, "fp8"))}


def test_head_router_and_attention_stay_in_bf16_under_fp8() -> None:
    for op in everything(blocks(V3, "head")) + everything(blocks(V3, "moe")):
        if op.cls in ("attention_forward", "attention_backward", "gate_gemm") or op.name.startswith("head"):
            assert op.dtype == "bf16", op.name


def test_recompute_moves_work_into_the_backward_only() -> None:
    forward = {r: blocks(V3, "moe", recompute=r)["attn F"] for r in RECOMPUTE}
    assert forward["none"] == forward["selective"] == forward["full"]
    again = {
        r: sum(o.flop for o in everything(blocks(V3, "moe", recompute=r)) if o.recompute) for r in RECOMPUTE
    }
    assert again["none"] == 0
    # q_up and kv_up: 2 x 4096 x (24576 x 1536 + 32768 x 512)
    assert again["selective"] == pytest.approx(2 * TOKENS * (24576 * 1536 + 32768 * 512))
    assert again["full"] == pytest.approx(
        sum(o.flop for p in ("attn F", "mlp F") for o in blocks(V3, "moe", recompute="none")[p])
    )


@given(tp=st.sampled_from([1, 2, 4, 8]), cp=st.sampled_from([1, 2, 4]))
@settings(max_examples=12, deadline=None)
def test_tp_and_cp_split_the_products_without_loss(tp: int, cp: int) -> None:
    whole = model_flop(everything(blocks(LLAMA, "dense", "bf16")))
    part = model_flop(everything(blocks(LLAMA, "dense", "bf16", tp=tp, cp=cp)))
    assert part * tp * cp == pytest.approx(whole)


def test_expected_distinct_tokens_lie_between_one_and_all() -> None:
    assert expected_received_tokens(V3, 1) == pytest.approx(1 / 8)
    # sampled with V3's gate: 7.49 distinct GPUs for 8 experts
    assert expected_received_tokens(V3, 64) == pytest.approx(7.49 / 8, rel=0.03)
    assert expected_received_tokens(V3, 256) == pytest.approx(1.0)


def test_optimizer_moves_the_bytes_of_its_state() -> None:
    norm_, update = optimizer_operators(1e9, BF16)
    assert norm_.bytes_read == 4e9
    assert update.bytes_read + update.bytes_written == pytest.approx(1e9 * (4 + 2 * (4 + 2 * 4) + 2))
    fp8_update = optimizer_operators(1e9, FP8, local_parameters=2e9)
    assert fp8_update[1].bytes_read < update.bytes_read, "BF16 moments are smaller"
    assert fp8_update[2].bytes_read + fp8_update[2].bytes_written == pytest.approx(6e9)


@pytest.mark.parametrize(
    ("shape", "kind", "more", "match"),
    [
        (V3, "moe", {"received_rows": 0.0}, "received_rows"),
        (LLAMA, "moe", {}, "no experts"),
        (V3, "dense", {"tp": 3}, r"parallel\.tp=3"),
        (V3, "dense", {"recompute": "some"}, "selective"),
    ],
)
def test_illegal_requests_say_what_is_wrong(
    shape: ModelShape, kind: BlockKind, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        blocks(shape, kind, **more)


def test_without_sequence_parallelism_every_rank_does_all_norms() -> None:
    shape = load_model("llama-3-8b")
    args = {"tokens": 4096, "sequence": 4096, "tp": 4}
    split, whole = (
        block_operators(shape, "dense", PRECISIONS["bf16"], **args, sequence_parallel=sp)
        for sp in (True, False)
    )
    for phase, ops in split.items():
        for one, other in zip(ops, whole[phase], strict=True):
            factor = 4.0 if one.cls in ("norm", "elementwise") else 1.0
            assert other.bytes_read == factor * one.bytes_read, one.name
