"""Steps of models with windows, chunks, latent experts and experts without computation, from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_kinds import EVERY, GPT_OSS, LATENT, LONGCAT, MAVERICK, saved, shape_of

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.cost_table import block_compute
from moesim.simulator.cost.layer_collectives import LayerCollectives
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.transfers import block_transfers
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

GPUS = {"gpt-oss": 1, "maverick": 16, "latent": 4, "longcat": 8}
"""Nodes that hold each model."""


def scenario(data: dict[str, Any], folder: Path, *more: str, nodes: int = 2, **changes: Any) -> Scenario:
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            f"model={saved(data, folder, **changes)}",
            f"cluster={{node: hgx-h200, nodes: {nodes}, network: mrft-ib-400g, price_per_gpu_hour: $2.5/h}}",
            "profile=h200-measured",
            "precision=bf16",
            "parallel={pp: 1, ep: 8, zero_stage: 1}",
            "schedule=1f1b",
            "batch.sequences=256",
            "recompute=full",
            "run.tokens=1e11",
            *more,
        ],
    )


@pytest.mark.parametrize("name", EVERY)
def test_a_step_lies_between_its_bounds(name: str, tmp_path: Path) -> None:
    result = moesim.simulate(scenario(EVERY[name], tmp_path, nodes=GPUS[name]))
    step = result.step
    assert step.lower_bound_s < step.time_s < step.upper_bound_s
    assert 0.05 < step.mfu_causal < 0.75
    assert result.memory.total_bytes > 0


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("software", ["flash", "flex", "unfused"])
def test_the_planner_prices_every_kind_as_the_engine_does(name: str, software: str, tmp_path: Path) -> None:
    own = scenario(
        EVERY[name], tmp_path, f"software.attention={software}", "recompute=selective", nodes=GPUS[name]
    )
    pricer = prepare(own).pricer
    book = PlanCosts(pricer.job.with_scenario(own))
    found = book.compute(own.parallel, own.recipe, "selective", ("alone",), own.communication.sms)
    for kind in pricer.shape.block_kinds:
        for key, cost in block_compute(pricer, kind, ("alone",)).items():
            assert found[key] == cost, key


def pricer_of(data: dict[str, Any], folder: Path, *more: str, **changes: Any) -> Pricer:
    return prepare(scenario(data, folder, *more, nodes=8, **changes)).pricer


def test_flex_attention_is_slower_and_a_window_saves_time(tmp_path: Path) -> None:
    flash, flex = (
        moesim.simulate(scenario(GPT_OSS, tmp_path, f"software.attention={how}", nodes=1)).step.time_s
        for how in ("flash", "flex")
    )
    assert flash < flex
    long = "batch.sequence_length=32768"
    pricer = pricer_of(GPT_OSS, tmp_path, long, "batch.sequences=128")
    for phase in ("attn F", "attn I"):
        window, full = (pricer.phase(kind, phase, "alone") for kind in ("moe/sliding", "moe/full"))
        assert window.fixed_s < 0.4 * full.fixed_s, phase


def test_latent_rows_shrink_dispatch_and_its_buffers(tmp_path: Path) -> None:
    narrow, wide = (pricer_of(LATENT, tmp_path, moe={"latent": latent}) for latent in (1024, None))
    for phase in ("dispatch F", "combine F", "combine B", "dispatch B"):
        one, other = (
            next(t for key, t in block_transfers(p, "moe", ("alone",)).items() if key[1] == phase)
            for p in (narrow, wide)
        )
        assert one.scale_up_bytes == pytest.approx(other.scale_up_bytes / 4)
        assert one.nic_bytes == pytest.approx(other.nic_bytes / 4)
    fewer, more = (moesim.simulate(p.scenario) for p in (narrow, wide))
    assert fewer.step.time_s < more.step.time_s


def test_experts_without_computation_save_rows_and_transfers(tmp_path: Path) -> None:
    zero, plain = (pricer_of(LONGCAT, tmp_path, moe={"zero_experts": n}) for n in (256, 0))
    assert zero.received_rows == pytest.approx(plain.received_rows * 8 / 12)
    assert zero.received_tokens is not None and plain.received_tokens is not None
    assert zero.received_tokens < plain.received_tokens
    row = [p.phase("moe", "mlp F", "alone").row_s for p in (zero, plain)]
    assert row[0] == pytest.approx(row[1] * 8 / 12, rel=0.1)
    with pytest.raises(InputError, match="256 experts without computation"):
        moesim.simulate(scenario(LONGCAT, tmp_path, "routing.load={kind: histogram, file: x.csv}", nodes=8))
    zipf = moesim.simulate(scenario(LONGCAT, tmp_path, "routing.load={kind: zipf, exponent: 0.4}", nodes=8))
    even = moesim.simulate(scenario(LONGCAT, tmp_path, nodes=8))
    assert zipf.step.time_s > even.step.time_s


def test_context_parallel_windows_send_only_their_keys(tmp_path: Path) -> None:
    plan_of = "parallel={pp: 1, ep: 8, cp: 4, zero_stage: 1}"
    pricer = pricer_of(GPT_OSS, tmp_path, plan_of, "batch.sequence_length=32768", "batch.sequences=128")
    kinds = ("moe/sliding", "moe/full")
    window, full = (LayerCollectives(pricer, kind).inside({}).exposed["attn F"] for kind in kinds)
    assert 0 < window < full
    one, other = (pricer.shape.block(kind).layer for kind in ("moe/sliding", "moe/full"))
    assert one is not None and other is not None
    share = one.attention.context_elements(32768) / other.attention.context_elements(32768)
    assert share == 128 / 32768


@pytest.mark.parametrize("name", EVERY)
def test_a_plan_search_finds_a_plan(name: str, tmp_path: Path) -> None:
    own = scenario(EVERY[name], tmp_path, nodes=GPUS[name])
    space = PlanSpace(
        tp=(1,), cp=(1,), vpp=(1,), microbatch=(1,), schedule=("1f1b",), recompute=("full",),
        zero_stage=(1,), precision=("bf16",), sms=(20,),
    )  # fmt: skip
    found = plan(own, space, top=1, workers=1)
    assert found.best is not None
    assert found.best.time_s <= moesim.simulate(own).step.time_s * 1.001


def test_shapes_are_those_of_published_totals() -> None:
    assert shape_of(MAVERICK).layer_counts == {
        "dense/chunked": 24, "moe/chunked": 12, "moe/full": 12,
    }  # fmt: skip
