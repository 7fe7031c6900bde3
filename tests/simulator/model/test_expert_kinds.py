"""Kinds of experts: on latent rows, without gates, with biases, without computation, with further norms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from lab.writers.link_loads import sample_choices, sampled_traffic
from model_kinds import GPT_OSS, LATENT, LONGCAT, MAVERICK, shape_of

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.parallel import Layout, check_against_model
from moesim.simulator.layout.routing import Gate, expected_targets
from moesim.simulator.layout.stages import blocks_of
from moesim.simulator.memory.activations import cached_tensors
from moesim.simulator.memory.gpu import local_parameters
from moesim.simulator.model.counts import block_parameters, parameters_activated
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators import block_operators, expected_received_tokens
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan

BF16 = PRECISIONS["bf16"]
FP8 = next(recipe for recipe in PRECISIONS.values() if recipe.linear == "fp8" and recipe.scaling == "tile")


def operators(
    shape: ModelShape, kind: str = "moe", precision: Precision = BF16, **more: Any
) -> list[Operator]:
    assert shape.moe is not None
    rows = 4096.0 * shape.moe.routed_rows
    phases = block_operators(shape, kind, precision, tokens=4096, sequence=4096, received_rows=rows, **more)
    return [op for ops in phases.values() for op in ops]


def by_name(shape: ModelShape, kind: str = "moe", **more: Any) -> dict[str, Operator]:
    return {op.name: op for op in operators(shape, kind, **more)}


def test_latent_experts_work_on_latent_rows() -> None:
    narrow, wide = shape_of(LATENT), shape_of(LATENT, moe={"latent": None})
    one, other = by_name(narrow, ep=8), by_name(wide, ep=8)
    for name in ("experts.gate_up", "experts.down", "experts.gate_up.dgrad", "experts.down.wgrad"):
        assert one[name].flop == other[name].flop / 4, name
    for name in ("experts.expand", "experts.reduce", "experts.reduce_gradient"):
        assert one[name].bytes_written == pytest.approx(other[name].bytes_written / 4), name
    for name in ("shared.gate_up", "gate"):
        assert one[name] == other[name], "they see the hidden state"
    assert {"latent_down", "latent_up", "latent_down.dgrad", "latent_up.wgrad"} <= one.keys()
    assert one["latent_down"].flop == one["latent_up"].flop == 2 * 4096 * 1024 * 4096
    assert (narrow.routed_width, wide.routed_width) == (1024, 4096)
    kept = {t.name: t.bytes_per_token for t in cached_tensors(narrow, "moe", BF16, "none")}
    assert kept["dispatched rows"] == 22 * 1024 * 2 and kept["combined latent rows"] == 1024 * 2
    casts = by_name(narrow, precision=FP8, ep=8)
    assert casts["latent.cast"].bytes_read == pytest.approx(2 * 4096 * 1024)
    assert casts["combine.cast_gradient"].bytes_read == pytest.approx(2 * 4096 * 1024)
    normed = by_name(shape_of(LATENT, moe={"latent_norm": True}))
    assert {"latent_norm", "latent_norm.backward"} <= normed.keys()


def test_experts_without_a_gate_have_one_branch() -> None:
    plain, gated = shape_of(LATENT), shape_of(LATENT, moe={"expert_gated": True})
    one, other = by_name(plain), by_name(gated)
    for name in ("experts.gate_up", "shared.gate_up", "experts.gate_up.wgrad", "shared.gate_up.dgrad"):
        assert one[name].flop == other[name].flop / 2, name
    assert one["experts.swiglu"].bytes_read == other["experts.swiglu"].bytes_read / 2
    assert one["experts.swiglu.backward"].bytes_read == other["experts.swiglu.backward"].bytes_read * 2 / 3
    assert one["experts.down"] == other["experts.down"]
    kept = [
        {t.name: t.bytes_per_token for t in cached_tensors(s, "moe", BF16, "none")} for s in (plain, gated)
    ]
    for name in ("experts gate and up", "shared experts gate and up"):
        assert kept[0][name] == kept[1][name] / 2
    assert plain.moe is not None and gated.moe is not None
    assert plain.moe.eager_elements(4096)[0] == 0 < gated.moe.eager_elements(4096)[0]


def test_biases_of_experts_are_added_and_summed() -> None:
    with_bias, without = (
        by_name(shape_of(GPT_OSS, moe={"expert_bias": b}), "moe/full") for b in (True, False)
    )
    assert with_bias.keys() - without.keys() == {"experts.down.bias", "experts.bias.wgrad"}
    rows = 4096 * 4
    assert with_bias["experts.down.bias"].bytes_read == rows * 2880 * 2
    assert with_bias["experts.bias.wgrad"].bytes_read == rows * (2 * 2880 + 2880) * 2
    dense = [{**MAVERICK, "ffn_bias": bias} for bias in (True, False)]
    one, other = (by_name(shape_of(data), "dense/full") for data in dense)
    assert one.keys() - other.keys() == {"ffn.bias.wgrad"}


def test_experts_without_computation_take_their_share_of_the_rows() -> None:
    shape, plain = shape_of(LONGCAT), shape_of(LONGCAT, moe={"zero_experts": 0})
    moe = shape.moe
    assert moe is not None and moe.routed_rows == 8 and plain.moe is not None and plain.moe.routed_rows == 12
    one, other = by_name(shape), by_name(plain)
    assert one["experts.down"].flop == other["experts.down"].flop * 8 / 12
    assert one["gate"].flop == other["gate"].flop * 768 / 512
    assert one.keys() - other.keys() == {"experts.unchanged", "experts.unchanged.backward"}
    kept = {t.name: t.bytes_per_token for t in cached_tensors(shape, "moe", BF16, "none")}
    assert kept["dispatched rows"] == 8 * 6144 * 2 and kept["gate scores"] == 768 * 4
    expert = 3 * 6144 * 2048
    assert parameters_activated(plain, True) - parameters_activated(shape, True) == 8 * (
        4 * expert - 256 * 6144
    )


def test_targets_of_a_gate_with_experts_without_computation_are_those_of_samples() -> None:
    gate = Gate(64, 6, zero_experts=32)
    targets = expected_targets(gate, 8, 4)
    choices = sample_choices(gate, 50_000, seed=1)
    assert (choices >= 64).mean() == pytest.approx(1 / 3, abs=2e-3)
    hit = np.stack([((choices // 8) == rank).any(axis=1) for rank in range(8)], axis=1)
    assert hit.sum(axis=1).mean() == pytest.approx(targets.distinct_gpus, rel=3e-3)
    nodes = hit.reshape(-1, 2, 4).any(axis=2).sum(axis=1).mean()
    assert nodes == pytest.approx(targets.distinct_nodes, rel=3e-3)
    missed = math.comb(96 - 8, 6) / math.comb(96, 6)
    assert targets.distinct_gpus == pytest.approx(8 * (1 - missed))
    traffic = sampled_traffic(gate, 8, 4, 4096, seed=3)
    assert traffic.rows.sum() / (8 * 4096) == pytest.approx(targets.distinct_gpus, rel=0.02)
    shape = shape_of(LONGCAT, moe={"experts": 64, "top_k": 6, "zero_experts": 32})
    assert shape.moe is not None
    tokens = expected_received_tokens(shape, 8) * shape.moe.routed_rows
    assert tokens == pytest.approx(targets.distinct_gpus)


def test_further_norms_have_kernels_inputs_and_weights() -> None:
    shape, plain = (shape_of(LATENT, moe={"extra_norms": n}) for n in (3, 0))
    more = by_name(shape).keys() - by_name(plain).keys()
    assert more == {f"experts.norm_{n}{end}" for n in range(3) for end in ("", ".backward")}
    assert block_parameters(shape, "moe").norms - block_parameters(plain, "moe").norms == 3 * 4096
    kept = [sum(t.bytes_per_token for t in cached_tensors(s, "moe", BF16, "none")) for s in (shape, plain)]
    assert kept[0] - kept[1] == 3 * 4096 * 2


def test_recomputed_experts_repeat_what_surrounds_them() -> None:
    shape = shape_of(LATENT)
    again = {op.name for op in operators(shape, recompute=("moe",), ep=8) if op.recompute}
    assert {"latent_down.recompute", "latent_up.recompute", "experts.down.recompute"} <= again


def test_latent_projections_are_whole_on_every_tensor_parallel_rank() -> None:
    shape = shape_of(LATENT)
    blocks = [block for block in blocks_of(shape) if block.kind == "moe"][:1]
    one, two = (
        local_parameters(
            shape, Layout(ParallelPlan(tp=tp, ep=8, sequence_parallel=tp > 1), 16, 8), blocks
        ).other
        for tp in (1, 2)
    )
    part = block_parameters(shape, "moe")
    latent = 2 * 4096 * 1024
    assert one - two == pytest.approx((part.attention + part.shared_experts - latent) / 2)


def test_learned_positions_are_parameters_of_the_embedding_and_a_sum() -> None:
    shape, plain = (shape_of(LATENT, learned_positions=n) for n in (2048, 0))
    layout = Layout(ParallelPlan(ep=8), 8, 8)
    one, other = (local_parameters(s, layout, blocks_of(s)).other for s in (shape, plain))
    assert one - other == 2048 * 4096
    assert by_name(shape, "embedding").keys() - by_name(plain, "embedding").keys() == {"embedding.positions"}


def test_tensor_parallelism_divides_every_width() -> None:
    data = {**MAVERICK, "dense_ffns": {"wide": 16384, "odd": 16388}, "ffn_layers": ["wide", "odd", "moe"]}
    del data["dense_ffn"]
    shape = shape_of(data)
    plan = ParallelPlan(tp=8, sequence_parallel=True)
    with pytest.raises(InputError, match=r"parallel.tp=8 does not divide dense_ffn=16388"):
        check_against_model(plan, shape, 8192, 1)
    check_against_model(ParallelPlan(tp=4, sequence_parallel=True), shape, 8192, 1)


def test_contradictions_are_told() -> None:
    groups = {"groups": 8, "groups_per_token": 4, "group_score": "best"}
    with pytest.raises(InputError, match="no published gate limits groups"):
        shape_of(LONGCAT, moe=groups)
    with pytest.raises(InputError, match="latent_norm is given without latent"):
        shape_of(LONGCAT, moe={"latent_norm": True})
