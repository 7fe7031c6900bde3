"""Core attention in FP8: its casts, its rates, its memory and its refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile, without_entries
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.compute import OperatorCost, SmContext, operator_seconds, without_timed_parts
from moesim.simulator.layout.job import resolve
from moesim.simulator.model.attention.softmax import FULL, HeadSizes, Reach, core_backward, core_forward
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.precision import Precision
from moesim.simulator.predict.plan_checks import check_hardware
from moesim.simulator.scoring.mlperf import scenario_of

LATENT = HeadSizes(128, 128, 192, 128)
GROUPED = HeadSizes(64, 8, 128, 128)
NARROW = HeadSizes(64, 8, 64, 64)


def core(sizes: HeadSizes, attention: str, reach: Reach = FULL, scales: bool = False) -> list[Operator]:
    w = Work(
        hidden=7168, fp8=False, tokens=4096, sequence=4096, tp=1, ep=1, rows=4096, received_tokens=4096,
        recompute="none", attention=attention, current_scales=scales,
    )  # fmt: skip
    return [*core_forward(w, sizes, reach), *core_backward(w, sizes, reach)]


def price(op: Operator, profile: str, accelerator: str) -> OperatorCost:
    return operator_seconds(op, load_accelerator(accelerator), load_profile(profile), SmContext())


def gap(profile: str) -> float:
    idle = load_profile(profile).launch_gap
    assert idle is not None
    return idle.value


def of_class(ops: Sequence[Operator], cls: str) -> Operator:
    return next(op for op in ops if op.cls == cls)


@pytest.mark.parametrize(
    ("accelerator", "attention", "forward_ms", "backward_ms"),
    [
        ("gb300", "", 0.864 / 2 / 0.99, 3.127 / 2 / 0.99),
        ("gb300", "mxfp8", 0.546 / 2 / 0.95, 2.348 / 2 / 0.95),
        ("gb200", "mxfp8", 0.714 / 2 / 0.95, 2.620 / 2 / 0.95),
        ("gb300", "fp8", 0.493 / 2 / 0.95, 1.803 / 2 / 0.95),
    ],
)
def test_latent_attention_takes_what_cudnn_measured(
    accelerator: str, attention: str, forward_ms: float, backward_ms: float
) -> None:
    ops = core(LATENT, attention)
    for cls, expected in (("attention_forward", forward_ms), ("attention_backward", backward_ms)):
        profile = f"{accelerator}-layers"
        cost = price(of_class(ops, cls), profile, accelerator)
        assert (cost.seconds - gap(profile)) * 1e3 == pytest.approx(expected, rel=0.005)
        assert not cost.extrapolations and cost.curve_ids[0].endswith("_192")


def test_operands_are_cast_along_rows_and_columns_or_joined_and_cast_once() -> None:
    operands = 4096 * 128 * (192 + 192 + 128)
    casts = {op.name: op for op in core(LATENT, "mxfp8") if op.cls in ("cast", "copy")}
    assert set(casts) == {"attention.cast", "attention.cast_gradient"}
    assert casts["attention.cast"].bytes_read == 2.0 * operands
    assert casts["attention.cast"].bytes_written == pytest.approx(2.0 * (1 + 1 / 32) * operands)
    assert casts["attention.cast_gradient"].bytes_read == 2.0 * 4096 * 128 * 128
    one = {op.name: op for op in core(LATENT, "fp8", scales=True) if op.cls in ("cast", "copy")}
    assert set(one) == {
        "attention.cast.join", "attention.cast.amax", "attention.cast",
        "attention.cast_gradient.amax", "attention.cast_gradient",
    }  # fmt: skip
    assert one["attention.cast"].bytes_written == operands
    assert not any(op.cls == "cast" for op in core(LATENT, ""))


def test_a_backward_in_fp8_computes_what_lies_outside_a_window() -> None:
    window = Reach("window", 128)
    low, plain, full = (
        of_class(ops, "attention_backward")
        for ops in (core(NARROW, "mxfp8", window), core(NARROW, "", window), core(NARROW, "mxfp8"))
    )
    assert low.flop == full.flop > 10 * plain.flop
    assert low.flop - low.uncounted_flop == pytest.approx(plain.flop - plain.uncounted_flop)
    assert price(low, "gb300-layers", "gb300").seconds > 3 * price(plain, "gb300-layers", "gb300").seconds


def test_hopper_takes_the_ratio_that_an_h200_showed_and_others_name_what_is_missing() -> None:
    low, plain = core(GROUPED, "fp8"), core(GROUPED, "")
    for cls, ratio in (("attention_forward", 1.444), ("attention_backward", 0.994)):
        slow, fast = (price(of_class(ops, cls), "h200-products", "h200-sxm") for ops in (plain, low))
        idle = gap("h200-products")
        assert (slow.seconds - idle) / (fast.seconds - idle) == pytest.approx(ratio, rel=1e-6)
    bare = without_entries(load_profile("gb300-layers"), ("cudnn-attention-*",))
    cost = operator_seconds(of_class(low, "attention_forward"), load_accelerator("gb300"), bare, SmContext())
    assert any("at the rates of BF16" in note for note in cost.assumptions)


def test_a_rate_of_the_whole_backward_leaves_no_kernel_around_it() -> None:
    parts = {op.name for op in core(LATENT, "")}
    for profile, accelerator, kept in (("gb300-layers", "gb300", False), ("h800-trace", "h800-sxm", True)):
        ops = without_timed_parts(
            tuple(core(LATENT, "")), load_accelerator(accelerator), load_profile(profile)
        )
        around = {op.name for op in ops if op.cls == "attention_pre_post"}
        assert bool(around) == kept and {op.name for op in ops} | around <= parts


def test_attention_in_fp8_needs_a_recipe_with_its_scales() -> None:
    assert Precision(linear="fp8", scaling="mx", attention="fp8").attention_variant == "mxfp8"
    assert Precision(linear="fp8", scaling="tensor", attention="fp8").attention_variant == "fp8"
    for linear, scaling in (("bf16", "tile"), ("fp8", "tile"), ("fp4", "tile")):
        with pytest.raises(ValidationError, match="attention=bf16"):
            Precision.model_validate({"linear": linear, "scaling": scaling, "attention": "fp8"})
    kept = [
        Precision(linear="fp8", scaling=scaling, attention="fp8").kept_operand_bytes(32.0)
        for scaling in ("mx", "tensor")
    ]
    assert kept == [66.0, 32.0]


def test_attention_in_fp8_is_refused_where_nothing_runs_it() -> None:
    scenario = scenario_of("gb300-512")
    cluster = resolve(scenario).cluster
    check_hardware(scenario, cluster)
    with pytest.raises(InputError, match=r"precision\.attention=fp8: software\.attention=flex") as error:
        check_hardware(scenario.overridden("software.attention=flex"), cluster)
    assert error.value.nearest == ("bf16",)
