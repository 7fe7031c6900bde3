"""What a layer keeps on one of two tensor-parallel ranks, against tensors that two H200 kept."""

from __future__ import annotations

from typing import Literal

import pytest

from moesim.simulator.frameworks.software import Software
from moesim.simulator.memory.activations import activation_bytes
from moesim.simulator.model.attention import GQA
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import Recompute, RecomputePolicy
from moesim.simulator.model.shape import ModelShape, ShapeSource
from moesim.simulator.scenario.parallel import ParallelPlan

BF16 = PRECISIONS["bf16"]


def _llama_layer(hidden: int, heads: tuple[int, int, int], width: int) -> ModelShape:
    return ModelShape(
        name="llama3",
        source=ShapeSource(kind="assumed", reference="host_blocks_models.py", date="2026-11-23"),
        n_layers=2,
        hidden=hidden,
        vocab=512,
        attention=GQA(heads=heads[0], kv_heads=heads[1], head_dim=heads[2]),
        moe=None,
        dense_ffn=width,
        tied_embeddings=False,
    )


@pytest.mark.parametrize(
    ("heads", "hidden", "width", "kernels", "recompute", "measured"),
    [
        ((8, 4, 128), 1024, 2816, "eager", "none", 20500.0),
        ((8, 4, 128), 1024, 2816, "eager", "op", 10512.0),
        ((8, 4, 128), 1024, 2816, "eager", "full", 1024.0),
        ((12, 4, 64), 1024, 3072, "eager", "op", 10008.0),  # Qwen3: norms of queries and keys run again
        ((64, 8, 128), 8192, 28672, "fused", "none", 153732.0),  # compiled
    ],
)
def test_dtensor_keeps_gathered_inputs_and_partial_sums_as_two_gpus_did(
    heads: tuple[int, int, int],
    hidden: int,
    width: int,
    kernels: Literal["eager", "fused"],
    recompute: RecomputePolicy,
    measured: float,
) -> None:
    """Bytes a token on one of two ranks, from lab/results/2026-11-22-h200-x2-compiled-blocks.json.xz.

    The norms' own numbers, 4 bytes a token, are not counted.
    """
    shape, plan = _llama_layer(hidden, heads, width), ParallelPlan(tp=2, sequence_parallel=True)
    software = Software(kernels=kernels, dtensor=True)
    kept = activation_bytes(shape, "dense", BF16, recompute, plan, 64, software) / 64
    assert 0.0 <= measured - kept <= 4.0
    without = software.model_copy(update={"dtensor": False})
    lost = kept - activation_bytes(shape, "dense", BF16, recompute, plan, 64, without) / 64
    assert lost == (2 * hidden if recompute == "none" else 3 * hidden if recompute == "op" else 0)


def test_lists_of_modules_free_under_tensor_parallelism_what_two_gpus_freed() -> None:
    """Bytes a token, from lab/results/2026-11-22-h200-x2-kept-megatron.json.xz.

    A layer there kept 1,540 bytes more whatever was recomputed: the GEMM's output beside rotated queries and
    keys, and factors of an unfused rotation.
    """
    shape = _llama_layer(1024, (12, 4, 64), 3072)
    measured: dict[tuple[bool, Recompute], float] = {
        (True, "none"): 16924.0,
        (True, ("mlp",)): 7708.0,
        (True, ("core_attn", "layernorm")): 14848.0,
        (True, ("core_attn", "layernorm", "mlp")): 5632.0,
        (False, "none"): 21024.0,
        (False, ("mlp",)): 11808.0,
        (False, ("core_attn", "layernorm", "mlp")): 7680.0,
    }
    for (sequence_parallel, recompute), measured_bytes in measured.items():
        plan = ParallelPlan(tp=2, sequence_parallel=sequence_parallel)
        kept = activation_bytes(shape, "dense", BF16, recompute, plan, 64) / 64
        norms = 0 if "layernorm" in recompute else (4 if sequence_parallel else 8)
        assert measured_bytes - kept == 1536 + norms
