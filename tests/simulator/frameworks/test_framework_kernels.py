"""Kernels of frameworks between GEMMs and at the end of a step, counted by hand from the shipped lists."""

from __future__ import annotations

from math import fsum

import pytest

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.frameworks.eager import eager, flat_gradients
from moesim.simulator.frameworks.kernel_lists import (
    LayerSizes,
    framework_kernels,
    layer_sizes,
    with_layer_kernels,
    with_step_kernels,
)
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators import block_operators, optimizer_operators
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.primitives import move
from moesim.simulator.scenario.parallel import ParallelPlan

GPT = load_model("gpt2")
RECIPE = Precision(linear="bf16")
TOKENS, SEQUENCE = 2048.0, 1024
HIDDEN = TOKENS * GPT.hidden
POINTWISE = ("norm", "elementwise", "copy")


def sizes(*features: str, whole: bool = False, plan: ParallelPlan | None = None) -> LayerSizes:
    layer = GPT.block("dense").layer
    assert layer is not None
    plan = plan or ParallelPlan()
    split = plan.tp, plan.sequence_parallel
    return layer_sizes(layer, GPT.hidden, TOKENS, SEQUENCE, features, whole, *split)  # type: ignore[arg-type]


def layer(name: str, *features: str, recompute: str = "none") -> list[Operator]:
    operators = block_operators(
        GPT,
        "dense",
        RECIPE,
        tokens=int(TOKENS),
        sequence=SEQUENCE,
        recompute=recompute,
        unfused_attention="unfused" in features,
        dropout="dropout" in features,
    )
    found = with_layer_kernels(operators, name, sizes(*features, whole=recompute == "full"))
    return [op for ops in found.values() for op in ops]


@pytest.mark.parametrize("experts", (16, 128))
def test_the_gradients_of_padding_are_added_one_after_the_other(experts: int) -> None:
    """Eight rows of padding an expert, whose indices have eight bytes (995 ns a row on H100)."""
    one = move("experts.reduce_gradient", "permute", "I", 4096.0, 1024.0, variant="reduce")
    moved, padding = eager(one, experts=experts, choices=4.0)
    assert (moved.variant, moved.choices, moved.bytes_read) == ("eager_reduce_gradient", 4.0, 16384.0)
    assert padding.bytes_read == 8 * 8 * experts
    cost = operator_seconds(
        padding, load_accelerator("h100-sxm"), load_profile("h100-from-h200"), SmContext(0, False)
    )
    assert cost.seconds * 1e9 == pytest.approx(995 * 8 * experts, rel=0.05)


def bytes_of(operators: list[Operator], *names: str) -> float:
    return fsum(op.bytes_read + op.bytes_written for op in operators if op.name in names)


@pytest.mark.parametrize("name", framework_kernels().layers)
def test_every_kernel_stands_at_an_operator_of_a_layer(name: str) -> None:
    features = ("unfused",) if "megatron-torch" in name else ()
    known = {
        op.name
        for ops in block_operators(
            GPT, "dense", RECIPE, tokens=64, sequence=64, recompute="none", unfused_attention=bool(features)
        ).values()
        for op in ops
    }
    known |= {"attention.scores", "attention.values", "attention.scores.dk"}
    chosen = framework_kernels().layers[name]
    assert {kernel.at for kernel in chosen.kernels} | set(chosen.instead_of) <= known
    made = {op.name for op in layer(name, *features)}
    assert not {"residual_scale", "residual_scale.backward"} & made, "no framework scales its residual"


def test_dropout_adds_its_mask_to_the_kernel_that_adds_the_residual() -> None:
    plain, dropped = layer("megatron-te"), layer("megatron-te", "dropout")
    forward = ("mlp.dropout_mask", "attention.dropout_mask")
    assert bytes_of(plain, *forward) == 0.0
    assert bytes_of(dropped, *forward) == pytest.approx(2 * HIDDEN)
    assert all(op.launches == 0 for op in dropped if op.name in forward), "the mask is no kernel of its own"
    assert bytes_of(dropped, "mlp.dropout.backward", "attention.dropout.backward") == pytest.approx(
        2 * 5 * HIDDEN
    )


def test_megatron_of_2021_moves_heads_gradients_and_alibi() -> None:
    found = layer("megatron-torch-alibi", "unfused", "dropout")
    scores = TOKENS * 12 * SEQUENCE
    assert bytes_of(found, "attention.alibi") == pytest.approx(4 * scores)
    assert bytes_of(found, "qkv.join_gradients") == pytest.approx(4 * 3 * HIDDEN)
    assert bytes_of(found, "attention.to_rows") == pytest.approx(4 * HIDDEN)
    assert bytes_of(layer("megatron-torch", "unfused"), "attention.alibi") == 0.0
    without = layer("megatron-torch-alibi")
    assert bytes_of(without, "attention.alibi", "attention.to_rows") == 0.0, "flash attention has no scores"


def test_unpadding_moves_every_row_there_and_back() -> None:
    found, without = layer("torch-unpadded"), layer("torch")
    assert bytes_of(found, "attention.unpad") == pytest.approx(4 * 3 * HIDDEN)
    assert bytes_of(found, "attention.unpad.backward") == pytest.approx(6 * 3 * HIDDEN)
    assert bytes_of(found, "attention.pad", "attention.pad.backward") == pytest.approx((6 + 4) * HIDDEN)
    assert {op.name for op in without} < {op.name for op in found}


def test_recompute_of_a_layer_repeats_the_kernels_of_its_forward() -> None:
    once, twice = layer("torch"), layer("torch", recompute="full")
    forward = [op for op in once if op.direction == "F" and op.cls in POINTWISE]
    again = [op for op in twice if op.recompute and op.cls in POINTWISE]
    assert sorted(op.name for op in again) == sorted(f"{op.name}.recompute" for op in forward)
    assert bytes_of(again, *(op.name for op in again)) == pytest.approx(
        bytes_of(forward, *(op.name for op in forward))
    )


def test_a_repeated_norm_does_not_repeat_the_residual() -> None:
    found = with_layer_kernels(
        block_operators(GPT, "dense", RECIPE, tokens=64, sequence=64, recompute=("layernorm",)),
        "torch",
        sizes(),
    )
    again = [op for ops in found.values() for op in ops if op.recompute]
    assert [op.name for op in again if op.cls != "norm"] == []
    assert {"attn_norm.recompute", "ffn_norm.recompute"} <= {op.name for op in again}


def test_sequence_parallel_ranks_split_hidden_states_and_all_split_heads() -> None:
    split = sizes(plan=ParallelPlan(tp=4, sequence_parallel=True))
    whole = sizes(plan=ParallelPlan(tp=4, sequence_parallel=False))
    assert split.elements["hidden"] * 4 == whole.elements["hidden"] == HIDDEN
    assert split.elements["heads"] == whole.elements["heads"] == HIDDEN / 4


@pytest.mark.parametrize(
    ("name", "local", "owned"),
    [
        # check 4, divide 8, zero 4; clip 8, read masters 4
        ("megatron-ddp", 16.0, 12.0),
        ("megatron-ddp-average", 4.0, 12.0),
        ("apex-distributed", 4.0, 0.0),
        # divide 8, norm 4, clip 8, zero 4; read masters 4
        ("deepspeed-bf16", 24.0, 4.0),
        # bucket 4, divide 4, overflow 10; flatten 10, clip 8, read masters 4
        ("deepspeed-fp16", 18.0, 22.0),
    ],
)
def test_bytes_of_a_step_by_parameter(name: str, local: float, owned: float) -> None:
    base = optimizer_operators(1e6, RECIPE)
    found = with_step_kernels(base, name, 1e6, 8e6, RECIPE, accumulated=True)
    more = fsum(op.bytes_read + op.bytes_written for op in found[len(base) :])
    assert found[: len(base)] == base
    assert more == pytest.approx(local * 8e6 + owned * 1e6)


def test_composers_adam_stands_in_the_place_of_the_fused_one() -> None:
    found = with_step_kernels(
        optimizer_operators(1.0, RECIPE), "composer", 1.0, 8.0, RECIPE, accumulated=False
    )
    assert "optimizer.adamw" not in {op.name for op in found}
    adam = fsum(op.bytes_read + op.bytes_written for op in found if op.name.startswith("adamw."))
    assert adam == 20.0 + 20.0 + 24.0 + 16.0


def test_an_unknown_list_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="megatron-ddp"):
        with_step_kernels((), "megatron-dp", 1.0, 1.0, RECIPE, accumulated=True)
    with pytest.raises(InputError, match=r"software\.layer_kernels='tosh'"):
        with_layer_kernels({}, "tosh", sizes())


def test_fsdp_divides_gradients_in_the_format_that_it_reduces() -> None:
    one = block_operators(GPT, "dense", RECIPE, tokens=64, sequence=64, recompute="none")

    def total(reduce_bytes: float, divided: bool) -> float:
        found = flat_gradients(one, 1e6, reduce_bytes, divided=divided)
        return fsum(op.bytes_read + op.bytes_written for op in found["mlp W"])

    assert total(4.0, True) - total(4.0, False) == pytest.approx(8e6)
    assert total(2.0, True) - total(2.0, False) == pytest.approx(4e6)
