"""Operators, FLOPs and memory of the kinds of sparse attention and of hyper-connections."""

from __future__ import annotations

from math import fsum
from typing import Any

import pytest
from pydantic import ValidationError
from sparse_kinds import M3, V32, v4_flash

from moesim.simulator.memory.activations import activation_bytes
from moesim.simulator.model.attention import DSA, MLA, Attention, BlockSparse, Compressed
from moesim.simulator.model.attention.softmax import mean_keys
from moesim.simulator.model.block import site_backward, site_forward
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.operators import block_operators
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan

BF16 = PRECISIONS["bf16"]
DENSE = MLA.model_validate({k: v for k, v in V32.model_dump().items() if k not in ("kind", "indexer")})


def work(sequence: int, **more: Any) -> Work:
    """One sequence on one GPU, without recompute."""
    fields: dict[str, Any] = {"hidden": 7168, "fp8": False, "tp": 1, "ep": 1, "rows": 0.0}
    fields |= {"received_tokens": 0.0, "recompute": "none", "tokens": float(sequence), "sequence": sequence}
    return Work(**(fields | more))


def everything(attention: Attention, w: Work) -> list[Operator]:
    """Operators of all three passes."""
    return [*attention.forward(w), *attention.input_gradient(w), *attention.weight_gradient(w)]


def only(operators: list[Operator], name: str) -> Operator:
    """The one operator with a name."""
    (op,) = [op for op in operators if op.name == name]
    return op


def shape_of(attention: Attention, hidden: int = 7168, **more: Any) -> ModelShape:
    """A dense model of two layers with this attention."""
    return ModelShape.model_validate(
        {"name": "two", "source": {"kind": "assumed", "reference": "a test"}, "n_layers": 2, "hidden": hidden,
         "vocab": 1024, "attention": attention, "dense_ffn": 2048, "tied_embeddings": False, **more}
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_compressed_attention_counts_window_and_compressed_keys(ratio: int) -> None:
    sequence, attention = 32768, v4_flash(ratio)
    counted = 0.0
    for position in range(1, sequence + 1):
        counted += min(position, 128)
        if ratio:
            counted += min(position // ratio, 512) if ratio == 4 else position // ratio
    assert attention.mean_keys(sequence) == pytest.approx(counted / sequence, abs=1.5)
    core = only(attention.forward(work(sequence, hidden=4096)), "attention")
    assert core.flop == pytest.approx(4 * 64 * 512 * counted, rel=0.01)


def test_the_core_of_a_long_sequence_reads_top_k_keys_in_the_absorbed_form() -> None:
    sequence = 131072
    core = only(V32.forward(work(sequence)), "attention")
    keys = sum(min(position, 2048) for position in range(1, sequence + 1))
    assert core.cls == "sparse_attention_forward"
    assert core.flop == pytest.approx(2 * 128 * (576 + 512) * keys, rel=1e-3)
    backward = only(V32.input_gradient(work(sequence)), "attention.backward")
    assert backward.flop == pytest.approx(2 * 128 * (3 * 576 + 2 * 512) * keys, rel=1e-3)
    assert backward.bytes_written > 4 * 576 * keys, "gradients of chosen keys are added one by one"


def test_the_indexer_scores_all_causal_keys_and_learns_from_the_chosen() -> None:
    sequence = 32768
    scores = only(V32.forward(work(sequence)), "indexer.scores")
    assert scores.flop == 2 * 64 * 128 * sequence * sequence / 2
    learned = only(V32.input_gradient(work(sequence)), "indexer.scores.backward")
    assert learned.flop == pytest.approx(6 * 64 * 128 * sequence * mean_keys(sequence, 2048))
    assert scores.uncounted_flop == scores.flop and learned.uncounted_flop == learned.flop
    names = {op.name for op in V32.input_gradient(work(sequence))}
    assert not any(n.startswith("indexer.q_up") for n in names), "its inputs are detached"


def test_a_short_sequence_is_dense_and_costs_at_least_the_dense_attention() -> None:
    w = work(2048)
    dense, sparse = everything(DENSE, w), everything(V32, w)
    index = [op for op in sparse if op.name.startswith("indexer")]
    assert [op for op in sparse if op not in index] == dense
    assert {op.name for op in index} >= {"indexer.scores", "indexer.top_k", "indexer.target"}
    assert fsum(op.flop for op in sparse) > fsum(op.flop for op in dense)
    assert "attention_forward" in {op.cls for op in M3.forward(work(2048, hidden=6144))}


def test_a_shared_choice_has_no_indexer_work() -> None:
    fields = V32.model_dump() | {"indexer": V32.indexer.model_dump() | {"shared": True}}
    operators = everything(DSA.model_validate(fields), work(8192))
    assert not [op for op in operators if op.name.startswith("indexer")]
    assert only(operators, "attention").cls == "sparse_attention_forward"


def test_tensor_parallel_ranks_share_heads_and_repeat_the_indexer() -> None:
    one, four = V32.forward(work(8192)), V32.forward(work(8192, tp=4))
    assert only(four, "attention").flop == only(one, "attention").flop / 4
    assert only(four, "indexer.scores") == only(one, "indexer.scores")
    assert V32.context_elements(8192) == 512 + 64 + 128
    assert v4_flash(128).context_elements(131072) < 6


def test_the_cache_of_v4_is_a_fraction_of_that_of_v32() -> None:
    """DeepSeek-V4's report states 10 % of V3.2's cache for V4-Pro at one million tokens; Flash has less."""
    tokens = 1_000_000
    v32 = V32.state_bytes(tokens, 1.0)
    csa, hca = v4_flash(4).state_bytes(tokens, 1.0), v4_flash(128).state_bytes(tokens, 1.0)
    assert 0.08 < (csa + hca) / 2 / v32 < 0.13
    assert v4_flash(0).state_bytes(tokens, 1.0) == 128 * 512


@pytest.mark.parametrize("attention", [V32, M3, v4_flash(4)])
def test_recompute_frees_memory_and_repeats_work(attention: Attention) -> None:
    shape = shape_of(attention, 4096)

    def kept(policy: Any) -> float:
        return activation_bytes(shape, "dense", BF16, policy, ParallelPlan(), 16384)

    assert kept("full") < kept(("core_attn",)) < kept("none")

    def flop(policy: Any) -> float:
        ops = block_operators(shape, "dense", BF16, tokens=16384, sequence=16384, recompute=policy)
        return fsum(op.flop for phase in ops.values() for op in phase)

    assert flop(("core_attn",)) > flop("none")
    if "mla_up_proj" in attention.modules:
        assert kept(("mla_up_proj",)) < kept("none") and flop(("mla_up_proj",)) > flop("none")


def test_hyper_connections_move_the_streams() -> None:
    pre, post = site_forward(100, 4096, 4, "attention")
    row = 100 * 4096 * 2
    assert (pre.bytes_read, pre.bytes_written) == (8 * row, row)
    assert (post.bytes_read, post.bytes_written) == (5 * row, 4 * row)
    back = site_backward(100, 4096, 4, "attention")
    assert [op.direction for op in back] == ["I", "I"]
    assert fsum(op.bytes_read for op in back) > pre.bytes_read + post.bytes_read
    plain, mixed = shape_of(v4_flash(0), 4096), shape_of(v4_flash(0), 4096, residual_streams=4)
    names = {
        op.name
        for phase in block_operators(mixed, "dense", BF16, tokens=8, sequence=8).values()
        for op in phase
    }
    sites = {"attention.hyper_pre", "attention.hyper_post", "ffn.hyper_pre", "ffn.hyper_post"}
    assert sites | {f"{s}.backward" for s in sites} <= names
    for policy in ("none", "full"):
        more = activation_bytes(mixed, "dense", BF16, policy, ParallelPlan(), 64)
        less = activation_bytes(plain, "dense", BF16, policy, ParallelPlan(), 64)
        assert more >= less + 64 * 3 * 4096 * 2, "a layer keeps four streams instead of one"


def test_block_sparse_keeps_groups_and_reads_blocks() -> None:
    core = only(M3.forward(work(65536, hidden=6144)), "attention")
    assert core.variant == "block" and core.flop == pytest.approx(
        4 * 64 * 128 * 65536 * mean_keys(65536, 2048)
    )
    assert isinstance(M3, BlockSparse) and M3.megatron_arguments() is None


def test_a_layer_that_takes_another_choice_has_no_indexer() -> None:
    fields = V32.model_dump() | {"indexer": V32.indexer.model_dump() | {"shared": True}}
    assert DSA.model_validate(fields).parameters(7168) == DENSE.parameters(7168)
    assert V32.parameters(7168) - DENSE.parameters(7168) == 7168 * (128 + 64) + 1536 * 8192 + 2 * 128


def test_contradictory_sizes_are_refused() -> None:
    with pytest.raises(ValidationError, match="does not divide heads"):
        Compressed.model_validate(v4_flash(0).model_dump() | {"o_groups": 7})
    with pytest.raises(ValidationError, match="no compressed keys"):
        Compressed.model_validate(v4_flash(4).model_dump() | {"ratio": 0})
