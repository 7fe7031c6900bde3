"""Casts of Transformer Engine, routers and biases of experts, counted by hand for one layer of experts."""

from __future__ import annotations

from math import fsum
from typing import Any

import pytest
from pydantic import ValidationError

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.frameworks.operators import apply_framework, with_stash
from moesim.simulator.frameworks.software import Software, StaticExperts
from moesim.simulator.memory.activations import activation_bytes, stashed_bytes, working_bytes
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan

TOKENS, ROWS = 4096, 8192.0
FP8 = Precision(linear="fp8", scaling="tensor")
BF16 = Precision(linear="bf16")
QWEN, LLAMA = load_model("qwen3-30b-a3b"), load_model("llama-3-8b")
GPT_OSS = load_model("gpt-oss-20b")

Phases = dict[str, tuple[Operator, ...]]


def phases(shape: ModelShape, recipe: Precision, **options: bool) -> Phases:
    kind = shape.main_layer_kind
    found = block_operators(
        shape,
        kind,
        recipe,
        tokens=TOKENS,
        sequence=TOKENS,
        ep=8,
        received_rows=ROWS,
        recompute="none",
        **options,
    )
    return {str(phase): ops for phase, ops in found.items()}


def adapted(shape: ModelShape, software: Software, wide_weights: bool = False) -> Phases:
    plain: Any = phases(shape, BF16)
    found = apply_framework(plain, software, BF16, 1, 0.0, 0.0, own_kernels=wide_weights)
    return {str(phase): ops for phase, ops in found.items()}


def moved(operators: Phases, *names: str) -> float:
    chosen = (op for ops in operators.values() for op in ops if not names or op.name in names)
    return fsum(op.bytes_read + op.bytes_written for op in chosen)


def test_rows_of_experts_and_their_gradients_are_cast_with_a_transpose() -> None:
    casts = [
        op
        for ops in phases(QWEN, FP8).values()
        for op in ops
        if op.name.startswith("experts.") and op.cls == "cast"
    ]
    h, f = 2048, 768
    sizes = {op.name: op.bytes_read + op.bytes_written for op in casts}
    assert sizes == {  # BF16 in, FP8 and its transpose out: 4 B an element
        "experts.gate_up.cast": 4 * ROWS * h,
        "experts.down.cast": 4 * ROWS * f,
        "experts.down.cast_gradient": 4 * ROWS * h,
        "experts.gate_up.cast_gradient": 4 * ROWS * 2 * f,
    }
    assert all(op.per_received_row for op in casts)
    assert not [op for ops in phases(QWEN, BF16).values() for op in ops if op.cls == "cast"]


def test_a_scale_of_the_tensor_itself_reads_it_once_more_before_every_cast() -> None:
    delayed, current = phases(QWEN, FP8), phases(QWEN, FP8, current_scales=True)
    largest = [op for ops in current.values() for op in ops if op.variant == "amax"]
    casts = [op for ops in current.values() for op in ops if op.cls == "cast" and op.variant != "amax"]
    assert len(largest) == len(casts)
    assert fsum(op.bytes_read for op in largest) == pytest.approx(fsum(op.bytes_read for op in casts))
    norm_fed = 3 * TOKENS * 2048 + 2 * TOKENS * 2048  # queries, keys and values behind a norm: cast, and amax
    experts_and_others = fsum(op.bytes_read for op in largest) - 2 * TOKENS * 2048
    assert moved(current) - moved(delayed) == pytest.approx(norm_fed + experts_and_others)


@pytest.mark.parametrize(
    ("how", "wide", "up", "down", "activation"),
    [
        ("split", False, 0.0, 28.0 - 2.0, 22 - 6 + 46 - 12 - 4),  # Megatron core: clamps in single operators
        ("split", True, 0.0, 68.0 - 2.0, 22 - 6 + 46 - 12 - 4),
        ("split-fp32", False, 14.0, 56.0, 0),
    ],
)
def test_biases_added_by_expert_split_and_join_the_rows(
    how: str, wide: bool, up: float, down: float, activation: float
) -> None:
    plain, split = phases(GPT_OSS, BF16), adapted(GPT_OSS, Software(expert_biases=how), wide_weights=wide)
    h = f = 2880
    weights = (
        4.0 * ROWS * (activation > 0)
    )  # gradients of routing weights, written by the activation's kernel
    removed = moved(plain, "experts.down.bias") + weights
    assert removed > 0.0
    assert moved(split) - moved(plain) + removed == pytest.approx(
        ROWS * (up * 2 * f + down * h + activation * f)
    )
    by_expert = [op for op in split["mlp F"] if op.name == "experts.down.bias"]
    assert [op.launches for op in by_expert] == [2 * 4]  # four experts of this GPU
    assert adapted(QWEN, Software(expert_biases=how)) == phases(QWEN, BF16)


def test_a_clamped_activation_keeps_its_clamped_branches_unless_it_is_repeated() -> None:
    def kept(shape: ModelShape, recompute: Recompute, how: str) -> float:
        plan, software = ParallelPlan(ep=8), Software(expert_biases=how)
        return activation_bytes(shape, shape.main_layer_kind, BF16, recompute, plan, TOKENS, software)

    routed = TOKENS * 4 * 2880
    assert kept(GPT_OSS, "none", "split") - kept(GPT_OSS, "none", "fused") == 2 * 2 * routed
    for recompute in (("moe_act",), "full"):
        assert kept(GPT_OSS, recompute, "split") == kept(GPT_OSS, recompute, "fused")
    assert kept(QWEN, "none", "split") == kept(QWEN, "none", "fused")


def test_megatron_rotates_halves_where_yarn_scales_them() -> None:
    software = Software(scaled_rotary="halves")
    turned = [op for ops in adapted(GPT_OSS, software).values() for op in ops if op.cls == "rope"]
    elements = {"rope_q": TOKENS * 64 * 64, "rope_k": TOKENS * 8 * 64}
    for op in turned:
        back = op.name.endswith(".backward")
        whole = elements[op.name.removesuffix(".backward")] * (28 if back else 24)
        assert (op.bytes_read + op.bytes_written, op.launches) == (whole, 7 if back else 12)
    assert len(turned) == 4
    assert adapted(QWEN, software) == phases(QWEN, BF16)


def test_repeated_biases_are_added_by_row_and_the_activation_is_clamped() -> None:
    eager = adapted(GPT_OSS, Software(kernels="eager"))
    repeated = adapted(GPT_OSS, Software(kernels="eager", expert_biases="repeated"))
    h = f = 2880
    removed = moved(eager, "experts.down.bias")
    activation = (36 - 10) + (100 - 18)
    assert moved(repeated) - moved(eager) + removed == pytest.approx(
        ROWS * (12 * (2 * f + h) + activation * f)
    )
    assert adapted(QWEN, Software(expert_biases="repeated")) == phases(QWEN, BF16)


def test_autograd_adds_the_gradients_of_layers_that_read_one_tensor() -> None:
    def added(shape: ModelShape, biases: str = "fused") -> float:
        software = Software(kernels="eager", expert_biases=biases)
        with_sums = software.model_copy(update={"gradient_sums": True})
        return moved(adapted(shape, with_sums)) - moved(adapted(shape, software))

    assert added(LLAMA) == pytest.approx(6 * 3 * TOKENS * 4096)  # two of q, k, v; one of gate and up
    assert added(QWEN) == pytest.approx(6 * (3 * TOKENS + ROWS) * 2048)  # one of the router, one of experts
    assert added(GPT_OSS) - added(GPT_OSS, "repeated") == pytest.approx(6 * ROWS * 2880)


def test_a_fused_router_has_few_kernels_and_a_fixed_choice_none() -> None:
    def gate(operators: Phases) -> list[Operator]:
        return [op for ops in operators.values() for op in ops if op.name.split(".")[0] == "gate"]

    chain, fused = gate(phases(QWEN, BF16)), gate(adapted(QWEN, Software(router="fused")))
    assert fsum(op.launches for op in chain if op.cls == "topk") == 37 + 26
    assert [op.launches for op in fused if op.cls == "topk"] == [3, 3]
    assert [op.flop for op in fused] == [op.flop for op in chain]
    assert gate(adapted(QWEN, Software(router="constant"))) == []


def test_rows_of_experts_are_padded_and_back_in_fp8_only() -> None:
    plain, software = phases(QWEN, FP8), Software(pad_expert_rows=True)
    found = apply_framework(plain, software, FP8, 1, 0.0, 0.0)  # type: ignore[arg-type]
    padded = {str(phase): ops for phase, ops in found.items()}
    copies = [op.name for ops in padded.values() for op in ops if op.cls == "copy"]
    assert copies == ["experts.pad", "experts.unpad", "experts.pad_gradient", "experts.unpad_gradient"]
    assert moved(padded) - moved(plain) == pytest.approx(4 * 4 * ROWS * 2048)
    assert adapted(QWEN, software) == phases(QWEN, BF16)


def test_a_stash_copies_what_the_experts_keep() -> None:
    found = with_stash(phases(QWEN, BF16), 1e9)  # type: ignore[arg-type]
    copies = {op.name: op for ops in found.values() for op in ops if "stash" in op.name}
    assert [found["mlp F"][-1].name, found["mlp I"][0].name] == ["experts.stash", "experts.unstash"]
    assert all(op.bytes_read == op.bytes_written == 1e9 and op.per_received_row for op in copies.values())
    assert with_stash(phases(QWEN, BF16), 0.0) == phases(QWEN, BF16)  # type: ignore[arg-type]


def test_static_experts_keep_more_than_their_rows() -> None:
    """Rows of 2,048 elements and 3 x 768 behind them, eight a token, in BF16: only these scale."""
    plan, kind = ParallelPlan(ep=8), QWEN.main_layer_kind
    routed = TOKENS * 8 * 2.0 * (2048 + 3 * 768)

    def kept(software: Software) -> float:
        return activation_bytes(QWEN, kind, BF16, "none", plan, TOKENS, software)

    plain = kept(Software())
    stashed, padded = (
        Software(static_experts=StaticExperts(capacity=4.0, stash=stash)) for stash in (1.5, 0.0)
    )
    assert kept(stashed) - plain == pytest.approx(0.5 * routed)
    assert kept(padded) - plain == pytest.approx(3.0 * routed)
    assert stashed_bytes(QWEN, kind, BF16, "none", plan, TOKENS, stashed) == pytest.approx(routed)
    assert stashed_bytes(QWEN, kind, BF16, "none", plan, TOKENS, padded) == 0.0
    assert working_bytes(QWEN, kind, plan, BF16, TOKENS, stashed) == pytest.approx(plain + 3.0 * routed)


def test_an_fp8_head_is_cast_as_linear_layers_are() -> None:
    tile = Precision(linear="fp8", head="fp8")
    ops = [
        op
        for ops in block_operators(QWEN, "head", tile, tokens=TOKENS, sequence=TOKENS).values()
        for op in ops
    ]
    assert {op.dtype for op in ops if op.gemm is not None} == {"fp8"}
    assert "head.cast" in {op.name for op in ops} and tile.logits == "bf16"
    with pytest.raises(ValidationError, match="head=fp8 needs linear=fp8"):
        Precision(linear="bf16", head="fp8")


# -- A fused grouped MLP leaves the grouped GEMMs and the kernels outside of them, an -----------

FUSED = Software(expert_kernels="fused")


@pytest.mark.parametrize("scaling", ["tile", "tensor"])
def test_only_kernels_between_the_grouped_gemms_go(scaling: str) -> None:
    recipe = Precision.model_validate({**PRECISIONS["fp8"].model_dump(), "scaling": scaling})
    operators = block_operators(
        load_model("deepseek-v3"), "moe", recipe, tokens=4096, sequence=4096, tp=1, cp=1, ep=64,
        received_rows=32768.0, recompute="selective",
    )  # fmt: skip
    fused = apply_framework(operators, FUSED, recipe, 1, 0.0, 0.0)
    gone = {op.name for ops in operators.values() for op in ops} - {
        op.name for ops in fused.values() for op in ops
    }
    assert "experts.swiglu" in gone
    assert "experts.gate_up.cast_gradient" in gone
    assert all(name.startswith("experts.") for name in gone)
    for phase, ops in operators.items():
        gemms = [op for op in ops if op.gemm is not None]
        assert [op for op in fused[phase] if op.gemm is not None] == gemms
        assert [op for op in fused[phase] if op.recompute] == [op for op in ops if op.recompute]


def test_it_is_refused_where_no_kernel_was_written() -> None:
    for overrides in (("precision=bf16", "cluster=b200-1024", "profile=b200-layers"), ("precision=fp8",)):
        with pytest.raises(InputError) as caught:
            moesim.check("deepseek-v3-2048xh800", *overrides, "software.expert_kernels=fused")
        assert (caught.value.key, caught.value.nearest) == ("software.expert_kernels", ("separate",))
