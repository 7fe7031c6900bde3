"""Operators around GEMMs with scales by blocks: MXFP8 and NVFP4 as Transformer Engine runs them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import ValidationError

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import Operator, Phase
from moesim.simulator.model.operators import block_operators, optimizer_operators
from moesim.simulator.model.precision import Precision
from moesim.simulator.scenario.machine import check_precision

MX, FP4, BF16 = Precision(linear="fp8", scaling="mx"), Precision(linear="fp4"), Precision(linear="bf16")
TOKENS = 4096


def layer(
    recipe: Precision, kind: str = "moe", name: str = "qwen3-30b-a3b"
) -> Mapping[Phase, tuple[Operator, ...]]:
    return block_operators(
        load_model("qwen3-30b-a3b"), "moe", recipe, tokens=TOKENS, sequence=TOKENS, ep=8,
        received_rows=8.0 * TOKENS, recompute="none", separate_casts=True,
    )  # fmt: skip


def all_of(recipe: Precision, cls: str) -> list[Operator]:
    return [op for ops in layer(recipe).values() for op in ops if op.cls == cls]


@pytest.mark.parametrize(("recipe", "each"), [(MX, 1 + 1 / 32), (FP4, 0.5 + 1 / 16)])
def test_one_cast_writes_rows_and_columns_with_their_scales(recipe: Precision, each: float) -> None:
    casts = [op for op in all_of(recipe, "cast") if op.bytes_written]
    assert casts and all(op.bytes_written == pytest.approx(op.bytes_read * each) for op in casts)
    # q, k, v, output projection and both projections of the experts, forward and backward
    assert {op.direction for op in casts} == {"F", "I"}
    assert not any(op.cls == "cast" for ops in layer(BF16).values() for op in ops)


def test_nvfp4_reads_a_tensor_for_its_largest_element_before_every_cast() -> None:
    names = [op.name for op in all_of(FP4, "cast")]
    written = [op.name for op in all_of(FP4, "cast") if op.bytes_written]
    assert sorted(names) == sorted([*written, *(f"{name}.amax" for name in written)])
    assert not any("amax" in op.name for op in all_of(MX, "cast"))


@pytest.mark.parametrize(("recipe", "dtype", "factor"), [(MX, "fp8", 0.5), (FP4, "fp4", 0.25)])
def test_all_three_gemms_of_a_layer_have_the_format(recipe: Precision, dtype: str, factor: float) -> None:
    for cls in ("gemm", "grouped_gemm", "wgrad_gemm"):
        ops, plain = all_of(recipe, cls), all_of(BF16, cls)
        assert ops and {op.dtype for op in ops} == {dtype} and {op.variant for op in ops} == {""}
        assert [op.flop for op in ops] == [op.flop for op in plain]
    read = [op.bytes_read for op in all_of(recipe, "grouped_gemm")]
    assert read == pytest.approx([factor * op.bytes_read for op in all_of(BF16, "grouped_gemm")])


def test_nothing_is_transposed_but_scales_of_weights() -> None:
    moved = all_of(MX, "transpose")
    assert moved and all(op.name.endswith(".weight_scales") for op in moved)
    up = next(op for op in moved if op.name == "experts.gate_up.weight_scales")
    assert up.bytes_read == 16 * (2 * 768) * 2048 / 32  # a byte for 32 elements of 16 experts


def test_tensors_are_gathered_before_their_scales_are_put_in_order() -> None:
    """TE 2.15: no scales in the order of the GEMM where a sequence-parallel group gathers the tensor."""
    shape = load_model("qwen3-30b-a3b")
    whole, split, alike = (
        block_operators(
            shape, "moe", MX, tokens=TOKENS, sequence=TOKENS, ep=8, received_rows=TOKENS,
            recompute="none", tp=tp, sequence_parallel=parallel,
        )
        for tp, parallel in ((1, True), (2, True), (2, False))
    )  # fmt: skip
    gathered = [op for ops in split.values() for op in ops if op.name.endswith(".gathered_scales")]
    assert [op.name.partition(".")[0] for op in gathered if op.direction == "F"] == ["qkv_proj"]
    rows = next(op for op in gathered if op.name.startswith("o_proj"))
    assert (rows.direction, rows.launches, rows.bytes_read) == ("I", 2, 2 * TOKENS * 2048 / 32)
    for other in (whole, alike):
        assert not any("gathered" in op.name for ops in other.values() for op in ops)
    cast = {
        name: next(op for op in ops["attn I"] if op.name == "o_proj.cast_gradient").bytes_read
        for name, ops in (("split", split), ("alike", alike))
    }
    assert cast["split"] == cast["alike"] / 2  # every rank casts its own tokens


def test_weights_are_cast_once_a_step() -> None:
    def quantise(recipe: Precision) -> Operator:
        return optimizer_operators(1e9, recipe, 2e9)[-1]

    assert quantise(MX).bytes_read == 4e9 and quantise(MX).bytes_written == 2e9 * 2 * (1 + 1 / 32)
    assert quantise(FP4).bytes_read == 8e9 and quantise(FP4).bytes_written == 2e9 * 2 * (0.5 + 1 / 16)
    assert quantise(BF16).name == "optimizer.adamw"


def test_blackwell_has_rates_of_fp4_above_those_of_fp8() -> None:
    profile, gpu = load_profile("gb200-layers"), load_accelerator("gb200")
    gemm = {r: next(op for op in all_of(r, "gemm") if op.name == "o_proj") for r in (BF16, MX, FP4)}
    seconds = {r: operator_seconds(op, gpu, profile, SmContext()) for r, op in gemm.items()}
    assert seconds[FP4].seconds < seconds[MX].seconds < seconds[BF16].seconds
    assert seconds[FP4].curve_ids == ("gb200-layers.gemm_fp4", "gb200-sustained.gemm_fp4")


def test_few_rows_a_group_are_slower_than_many() -> None:
    profile, gpu = load_profile("gb200-layers"), load_accelerator("gb200")

    def rate(rows: float) -> float:
        op = next(
            op
            for op in block_operators(
                load_model("qwen3-30b-a3b"), "moe", BF16, tokens=TOKENS, sequence=TOKENS, ep=8,
                received_rows=rows, recompute="none",
            )["mlp F"]
            if op.cls == "grouped_gemm"
        )  # fmt: skip
        return op.flop / operator_seconds(op, gpu, profile, SmContext()).seconds

    few, many = rate(16 * 128.0), rate(16 * 4096.0)
    assert few / many == pytest.approx(0.39, rel=0.25)
    assert rate(16 * 512.0) > few


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"linear": "fp4", "scaling": "mx"}, "NVFP4"), ({"linear": "bf16", "scaling": "mx"}, "linear: fp8")],
)
def test_scales_that_a_format_has_not_are_refused(fields: dict[str, str], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Precision.model_validate(fields)


def test_an_accelerator_without_scales_by_blocks_refuses_them_with_the_nearest_choice() -> None:
    hopper = load_cluster("deepseek-h800-2048")
    for recipe, what in ((FP4, "linear=fp4"), (MX, "scaling=mx")):
        with pytest.raises(InputError, match=rf"{what}.*linear: fp8, scaling: tensor"):
            check_precision(recipe, hopper)
    check_precision(BF16, hopper)
