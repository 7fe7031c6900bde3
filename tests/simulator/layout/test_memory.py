from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import Sourced
from moesim.simulator.dispatchers.protocol import Call, ExpertBuffers
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block, StageAssignment, blocks_of, from_layers_per_stage
from moesim.simulator.memory.activations import activation_bytes, cached_tensors, working_bytes
from moesim.simulator.memory.allocator import AllocatorBytes
from moesim.simulator.memory.gpu import (
    BUFFERS_SLACK,
    FRAMEWORK_BYTES,
    FSDP_SLACK,
    REPLAY_ERRORS,
    MemoryInputs,
    MemoryReport,
    RankMemory,
    RankStages,
    allocator_slack,
    local_parameters,
    memory_by_kind,
    most_reserved,
    pipeline_buffer_bytes,
    rank_stages,
    retries_s,
)
from moesim.simulator.memory.rank_bytes import workspace_bytes
from moesim.simulator.model.attention import GQA
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.counts import parameters_mtp, parameters_total
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.driver import check
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import build
from moesim.simulator.scoring.scoreboard.runs import runs, scenario_of_run

V3 = load_model("deepseek-v3")
LLAMA = load_model("llama-3-8b")
RUNS = Path(__file__).parents[3] / "simulator" / "data" / "published" / "h200-runs.csv"
HOME_STAGES = from_layers_per_stage(blocks_of(V3), (4,) * 15 + (1,))
POLICIES: tuple[RecomputePolicy, ...] = get_args(RecomputePolicy)


def home(
    zero: int = 1,
    policy: RecomputePolicy = "deepseek-v3",
    capacity: float = 80e9,
    kernels: str = "deepep-2025-02",
) -> MemoryReport:
    layout = Layout(ParallelPlan(pp=16, ep=64, zero_stage=zero), 2048, 8)
    ranks = [RankStages((r, 15 - r), ({r: 16 - r, 15 - r: r + 1},)) for r in range(16)]
    inputs = MemoryInputs(V3, layout, PRECISIONS["fp8"], policy, 4096, 20, kernels)
    return memory_by_kind(inputs, HOME_STAGES, ranks, capacity)


def single(shape: ModelShape, zero: int = 0, n_gpus: int = 8, precision: str = "bf16") -> MemoryReport:
    layout = Layout(ParallelPlan(zero_stage=zero), n_gpus, 8)
    assignment = StageAssignment((blocks_of(shape),))
    inputs = MemoryInputs(shape, layout, PRECISIONS[precision], "none", 4096, 20, "deepep-2025-02")
    return memory_by_kind(inputs, assignment, [RankStages((0,), ({0: 1},))], 80e9)


def test_experts_on_the_first_stage_alone_keep_the_note_on_their_buffers() -> None:
    layout = Layout(ParallelPlan(ep=256), 256, 8)  # no pipeline, and more ranks than any published ring size
    inputs = MemoryInputs(V3, layout, PRECISIONS["fp8"], "full", 4096, 20, "deepep-2025-02")
    report = memory_by_kind(inputs, StageAssignment((blocks_of(V3),)), [RankStages((0,), ({0: 1},))], 80e9)
    assert report.notes == (
        "communication buffers of EP256 use the ring sizes of EP160, the largest that are published",
    )


def test_home_case_weights_by_hand() -> None:
    """An inner rank holds 8 MoE layers: 4 of 256 experts each, and all that is not sharded."""
    layer_other = 187.107e6 + 44.04e6 + 1.835e6 + 0.0165e6
    experts, other = 8 * 4 * 44.04e6, 8 * layer_other
    inner = home().by_rank[5]
    assert inner.weights == pytest.approx(2 * (experts + other), rel=1e-3)
    assert inner.gradients == pytest.approx(4 * (experts + other), rel=1e-3)
    # FP32 master and two BF16 moments over 2 x 2 copies of the experts, 128 x 2 of the rest
    assert inner.optimizer == pytest.approx(8 * (experts / 4 + other / 256), rel=1e-3)


def passes(zero: int = 0, sequences: int = 1, **software: object) -> RankMemory:
    """Llama 3 8B on one GPU of eight, with one micro-batch or several."""
    layout = Layout(ParallelPlan(zero_stage=zero), 8, 8)
    inputs = MemoryInputs(
        LLAMA, layout, PRECISIONS["bf16"], "none", 4096, 20, "nccl",
        software=Software.model_validate(software), single_pass=sequences == 1,
    )  # fmt: skip
    ranks = [RankStages((0,), ({0: 1},))]
    return memory_by_kind(inputs, StageAssignment((blocks_of(LLAMA),)), ranks, 80e9).by_rank[0]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(
    "software", [{}, {"step_kernels": "megatron-ddp"}, {"weight_gradients": "added-fp32"}]
)
def test_gradients_with_buffers_count_whole_with_one_microbatch(
    zero: int, software: dict[str, object]
) -> None:
    """A buffer that GEMMs add into is there before the first forward (eq. M47)."""
    one, many = (passes(zero, sequences, **software) for sequences in (1, 16))
    assert one == many
    assert one.gradients >= 4 * parameters_total(LLAMA) / (8 if zero == 2 else 1)


def test_gradients_of_autograd_replace_activations_up_to_the_fullest_moment() -> None:
    """By hand, block after block: activations that are left, gradients that are made, the block's own."""
    layout = Layout(ParallelPlan(), 8, 8)
    recipe, plain = PRECISIONS["bf16"], Software(weight_gradients="written")

    def sizes(kind: BlockKind) -> tuple[float, float, float]:
        held = local_parameters(LLAMA, layout, [Block(kind)], 0)
        kept = activation_bytes(LLAMA, kind, recipe, "none", layout.plan, 4096, plain)
        beside = workspace_bytes(LLAMA, kind, layout.plan, recipe, 4096, plain)
        return kept, (held.experts + held.other) * recipe.gradient_bytes, beside

    blocks = [block.kind for block in blocks_of(LLAMA)]
    left, made = math.fsum(sizes(kind)[0] for kind in blocks), 0.0
    peak = left + sizes("head")[2]
    for kind in reversed(blocks):
        kept, gradient, beside = sizes(kind)
        peak = max(peak, left + made + gradient + (0.0 if kind == "head" else beside))
        left, made = left - kept, made + gradient
    found = passes(weight_gradients="written")
    assert found.gradients + found.activations + found.workspace == pytest.approx(max(peak, made))
    assert 0.0 < found.gradients < passes().gradients
    assert passes(sequences=2, weight_gradients="written").gradients == passes().gradients


def test_gradients_that_wait_for_the_last_microbatch_are_whole() -> None:
    whole, shard = (passes(2, 16, gradient_sync=sync) for sync in ("last-microbatch", "every-microbatch"))
    assert whole.gradients == passes(1, 16).gradients
    assert shard == passes(2, 16)
    assert shard.gradients < whole.gradients / 4


def test_copies_of_a_stage_scatter_their_own_microbatches() -> None:
    """Each of DualPipe's two ranks keeps the sums of its own micro-batches, cut over its own replicas."""
    reports = [home(zero).by_rank[5] for zero in (1, 2)]
    held = local_parameters(V3, Layout(ParallelPlan(pp=16, ep=64), 2048, 8), HOME_STAGES.stages[5], 0)
    other = local_parameters(V3, Layout(ParallelPlan(pp=16, ep=64), 2048, 8), HOME_STAGES.stages[10], 0)
    cut = (held.experts + other.experts) / 2 + (held.other + other.other) / 128
    largest = (held.experts + held.other) / 4  # one of the stage's four blocks, before its scatter
    assert reports[1].gradients == pytest.approx(4 * (cut + largest), rel=1e-6)
    assert reports[0].optimizer == reports[1].optimizer


def test_plain_data_parallel_holds_everything() -> None:
    report = single(LLAMA)
    n = parameters_total(LLAMA)
    assert report.by_kind_bytes["weights"] == pytest.approx(2 * n)
    assert report.by_kind_bytes["gradients"] == pytest.approx(4 * n)
    assert report.by_kind_bytes["optimizer"] == pytest.approx(12 * n)  # FP32 master and two moments
    assert single(LLAMA, zero=1).by_kind_bytes["optimizer"] == pytest.approx(12 * n / 8)
    assert report.by_kind_bytes["communication_buffers"] == 0


def test_parameters_of_all_ranks_add_up() -> None:
    layout = Layout(ParallelPlan(pp=16, ep=64), 1024, 8)
    parts = [local_parameters(V3, layout, stage) for stage in HOME_STAGES.stages]
    total = sum(64 * p.experts + p.other for p in parts)
    extra_table = V3.vocab * V3.hidden  # the MTP module's copy of the embedding, away from stage 0
    extra_norm = V3.hidden  # the second head pass has a final norm of its own
    expected = parameters_total(V3) + parameters_mtp(V3) + extra_table + extra_norm
    assert total == pytest.approx(expected, rel=1e-9)


def test_shared_tables_count_once_on_a_rank() -> None:
    layout = Layout(ParallelPlan(pp=16, ep=64), 1024, 8)
    first, last = HOME_STAGES.stages[0], HOME_STAGES.stages[-1]
    together = local_parameters(V3, layout, (*first, *last)).other
    apart = local_parameters(V3, layout, first).other + local_parameters(V3, layout, last).other
    assert apart - together == pytest.approx(V3.vocab * V3.hidden)
    tied = LLAMA.model_copy(update={"tied_embeddings": True})
    one = Layout(ParallelPlan(), 8, 8)
    assert local_parameters(tied, one, blocks_of(tied)).other == parameters_total(tied)


def test_deepseek_cache_by_hand() -> None:
    """Bytes a token of one MoE layer: residuals, latents, E5M6 output, FP8 rows and SwiGLU inputs."""
    fp8 = 1 + 4 / 128
    by_hand = (
        2 * 7168 + 2 * (1536 + 512 + 64) + 1.5 * 16384 + 4 * 128  # attention
        + 2 * 7168 + 4 * 256 + 8 * 8  # norm input, gate
        + 8 * 7168 * fp8 + 8 * 4096 * fp8 + 4096 * fp8  # experts, shared expert
    )  # fmt: skip
    tensors = cached_tensors(V3, "moe", PRECISIONS["fp8"], "deepseek-v3")
    assert sum(t.bytes_per_token for t in tensors) == pytest.approx(by_hand)


@pytest.mark.parametrize("kind", ["embedding", "dense", "moe", "mtp", "head"])
def test_policies_keep_less_and_less(kind: BlockKind) -> None:
    plan = ParallelPlan()
    kept = {p: activation_bytes(V3, kind, PRECISIONS["fp8"], p, plan, 4096) for p in POLICIES}
    assert kept["none"] >= kept["selective"] >= kept["deepseek-v3"] >= 0
    if kind not in ("embedding", "head"):
        assert kept["none"] > kept["selective"] > kept["deepseek-v3"] > kept["full"] > 0
    assert working_bytes(V3, kind, plan, PRECISIONS["fp8"], 4096) >= kept["none"]


def test_tensor_and_context_parallel_cut_the_cache() -> None:
    def bytes_of(**plan: int | bool) -> float:
        return activation_bytes(
            LLAMA, "dense", PRECISIONS["bf16"], "none", ParallelPlan.model_validate(plan), 4096
        )

    whole = bytes_of()
    assert bytes_of(cp=2) == pytest.approx(whole / 2)
    assert bytes_of(microbatch=3) == pytest.approx(whole * 3)
    assert bytes_of(tp=2, sequence_parallel=True) == pytest.approx(whole / 2)
    assert whole / 2 < bytes_of(tp=2) < whole


def test_activations_take_the_worst_moment() -> None:
    assignment = from_layers_per_stage(blocks_of(LLAMA), (16, 16))
    layout = Layout(ParallelPlan(pp=2), 8, 8)

    def activations(*states: dict[int, int]) -> float:
        ranks = [RankStages((0,), tuple(states)), RankStages((1,), ({1: 1},))]
        inputs = MemoryInputs(LLAMA, layout, PRECISIONS["bf16"], "none", 4096, 0, "deepep-2025-02")
        return memory_by_kind(inputs, assignment, ranks, 1e12).by_rank[0].activations

    assert activations({0: 1}, {0: 4}, {0: 2}) == pytest.approx(4 * activations({0: 1}))
    assert activations() == 0


def test_ranks_must_cover_the_stages() -> None:
    layout = Layout(ParallelPlan(pp=2), 8, 8)
    inputs = MemoryInputs(V3, layout, PRECISIONS["fp8"], "none", 4096, 20, "deepep-2025-02")
    with pytest.raises(InputError, match="cut into 16 stages"):
        memory_by_kind(inputs, HOME_STAGES, [RankStages((0, 1), ())], 80e9)


def slacks(path: Path, active: str, reserved: str) -> list[float]:
    """Reserved over active bytes less 1 of published runs, in order."""
    return sorted(float(r[reserved]) / float(r[active]) - 1.0 for r in csv.DictReader(path.open()))


def over_states() -> list[float]:
    """Bytes reserved beyond the active ones over the predicted optimizer states of the five H200 runs."""
    found = []
    for run in runs():
        memory = check(scenario_of_run(run).overridden("software.allocator=none")).memory
        slack = (run.peak_reserved_gib - run.peak_active_gib) * 2.0**30
        found.append(slack / memory.by_kind_bytes["optimizer"])
    return sorted(found)


@pytest.mark.parametrize(("number", "file"), [(FSDP_SLACK, "h200-runs"), (BUFFERS_SLACK, "allocator-peaks")])
def test_slack_is_what_published_runs_reserved(number: Sourced, file: str) -> None:
    """Two digits, the ends rounded outwards."""
    known = over_states()
    if number is BUFFERS_SLACK:
        known = slacks(RUNS.parent / "allocator-peaks.csv", "active_mib", "reserved_mib")
    assert file in number.source
    assert number.value == pytest.approx(statistics.median(known), abs=0.006)
    assert number.range == (math.floor(100 * known[0]) / 100, math.ceil(100 * known[-1]) / 100)


def test_slack_of_fsdp_follows_states_and_not_activations() -> None:
    """A pool of another stream holds gradients, however many activations lie in that of compute."""
    kinds = dict.fromkeys(("weights", "gradients", "workspace", "communication_buffers", "framework"), 0.0)
    few, many = ({**kinds, "optimizer": 10e9, "activations": n} for n in (1e9, 100e9))
    beyond = [most_reserved(k, 1.32, 1.0) - 6e9 - 10e9 - k["activations"] for k in (few, many)]
    assert beyond == pytest.approx([13.2e9, 13.2e9])
    assert most_reserved(many, 0.17, 0.0) == pytest.approx(1.17 * 110e9 + 6e9)
    assert allocator_slack(Software(parameters_copied=True), 0) is BUFFERS_SLACK, "nothing is gathered"


def test_compiled_blocks_keep_what_two_gpus_kept() -> None:
    """The layer with experts also kept rows that pad groups to 8, at these sizes an eighth of all.

    lab/results/2026-11-22-h200-x2-compiled-blocks.json.xz, `llama3 tiny compiled`, `qwen3_moe tiny compiled`.
    """
    attention = {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 64}
    common = {**LLAMA_FILE, "n_layers": 2, "hidden": 256, "vocab": 512}
    moe = {"experts": 16, "top_k": 4, "expert_ffn": 128, "shared_experts": 0, "scoring": "softmax"}
    normed = {**common, "attention": {**attention, "qk_norm": True}, "moe": moe}
    layers = {"dense": {**common, "attention": attention, "dense_ffn": 704}, "moe": normed}
    software = Software(parameters_copied=True, compiled_blocks=True, expert_rows="eager")
    kept = {
        kind: activation_bytes(
            ModelShape.model_validate(layers[kind]), kind, PRECISIONS["bf16"], "none",
            ParallelPlan(microbatch=1, zero_stage=3), 128, software,
        ) / 128
        for kind in layers
    }  # fmt: skip
    assert kept["dense"] == pytest.approx(7832, rel=0.002)
    assert 0.85 * 15340 < kept["moe"] < 15340


LLAMA_FILE = {
    "name": "tiny",
    "source": {"kind": "published", "reference": "torchtitan 0.2.2", "date": "2026-11-22"},
    "tied_embeddings": False,
}


def test_retries_free_and_take_what_is_cached_in_every_microbatch() -> None:
    """100 segments of 20 MiB, 8 micro-batches, 300 us each at most."""
    assert retries_s(100 * 20 * 2.0**20, 8) == pytest.approx(8 * 100 * 300e-6)
    assert retries_s(-1.0, 8) == 0.0


def test_memory_has_the_range_of_framework_and_allocator() -> None:
    """Home keeps parameters and gradients in buffers, as Megatron-LM does; ZeRO-3 and FSDP do not."""
    assert FRAMEWORK_BYTES.kind == "assumed" and FRAMEWORK_BYTES.range is not None
    assert home().slack is BUFFERS_SLACK
    assert allocator_slack(Software(), 3) is FSDP_SLACK
    assert allocator_slack(Software(parameters_copied=True), 2) is FSDP_SLACK
    rank = home().by_rank[1]
    tensors = rank.total - rank.framework - rank.communication_buffers
    low, high = FRAMEWORK_BYTES.range
    least, most = rank.range(BUFFERS_SLACK)
    assert least == pytest.approx(rank.total - rank.framework + low)
    assert most == pytest.approx(rank.total - rank.framework + high + 0.17 * tensors)
    assert least < rank.total < most


def test_a_replayed_allocator_leaves_its_error_and_the_framework() -> None:
    rank, error = home().by_rank[1], REPLAY_ERRORS["expandable"]
    least, most = rank.range(error, AllocatorBytes(active=60 * 10**9, reserved=70 * 10**9))
    assert least == pytest.approx(61e9)
    assert most == pytest.approx(1.03 * 70e9 + 6e9)


@pytest.mark.parametrize(
    ("capacity", "verdict"), [(100e9, "fits"), (72e9, "at risk"), (70e9, "at risk"), (69e9, "does not fit")]
)
def test_a_plan_whose_reserved_range_crosses_the_card_is_at_risk(capacity: float, verdict: str) -> None:
    memory = MemoryResult(
        total_bytes=70e9,
        range_bytes=(68e9, 95e9),
        capacity_bytes=capacity,
        fits=capacity >= 70e9,
        by_kind_bytes={},
    )
    assert memory.verdict == verdict
    assert (memory.risk is not None) == (verdict == "at risk")
    assert json.loads(memory.model_dump_json())["verdict"] == verdict
    assert MemoryResult.model_validate_json(memory.model_dump_json()) == memory


@pytest.mark.parametrize(
    ("policy", "tp", "sequence_parallel", "published"),
    [
        ("none", 1, True, lambda t, scores: 34 + scores),  # arXiv 2205.05198, eq. 1
        ("none", 8, False, lambda t, scores: 10 + 24 / t + scores / t),  # eq. 2
        ("none", 8, True, lambda t, scores: (34 + scores) / t),  # eq. 4
        ("attention", 8, True, lambda t, scores: 34 / t),  # table 2, selective recompute
        ("attention", 1, True, lambda t, scores: 34),
        ("full", 1, True, lambda t, scores: 2),
    ],
)
def test_activations_of_a_gpt_layer_are_the_published_ones(
    policy: RecomputePolicy, tp: int, sequence_parallel: bool, published: Callable[[int, float], float]
) -> None:
    """Bytes of one layer over s b h, for GPT-3 with dropout and scores in memory."""
    h, heads, s = 12288, 96, 2048
    shape = LLAMA.model_copy(
        update={
            "hidden": h, "dense_ffn": 4 * h, "ffn_gated": False,
            "attention": GQA(heads=heads, kv_heads=heads, head_dim=h // heads),
        }
    )  # fmt: skip
    plan = ParallelPlan(tp=tp, sequence_parallel=sequence_parallel)
    software = Software(attention="unfused", dropout=True)
    bf16 = PRECISIONS["bf16"]
    kept = activation_bytes(shape, "dense", bf16, policy, plan, s, software)
    assert kept / (s * h) == pytest.approx(published(tp, 5 * heads * s / h), rel=1e-12)


def expert_buffers(ranks: int, sms: int, kernels: str, nodes: int = 1) -> ExpertBuffers:
    return dispatcher(kernels).buffers(Call(ranks, nodes, sms, 4096, 7168, experts=256))


def test_deepep_buffers() -> None:
    buffers = expert_buffers(64, 20, "deepep-2025-02")
    assert buffers.nvlink_bytes == pytest.approx(377.7e6, abs=0.05e6)
    assert buffers.rdma_bytes == pytest.approx(336.0e6, abs=0.1e6)
    assert expert_buffers(1, 20, "deepep-2025-02").total_bytes == 0
    # Hybrid-EP has room for every token of every rank: 3.8 GB for EP64, and weights of the domain's experts.
    rack = expert_buffers(64, 32, "hybridep", 1)
    assert rack.nvlink_bytes == 4096 * 64 * (2 * 7168 + 4 * 56 + 4 * 256) and rack.rdma_bytes == 0
    nodes = expert_buffers(64, 32, "hybridep", 8)
    assert nodes.nvlink_bytes == 4096 * 64 * (2 * 7168 + 4 * 56 + 4 * 32)
    assert nodes.rdma_bytes == 4096 * (22 * 2 * 7168 + 4 * 256)
    assert expert_buffers(8, 20, "deepep-2025-02").rdma_bytes == 0
    assert expert_buffers(64, 24, "deepep-2025-02").nvlink_bytes > buffers.nvlink_bytes
    assert expert_buffers(320, 20, "deepep-2025-02").note is not None
    assert expert_buffers(64, 20, "nccl").total_bytes == 0
    engine = expert_buffers(64, 0, "deepep-2025-04").total_bytes  # one channel of the ten of 20 SMs
    assert engine == pytest.approx(buffers.total_bytes / 10, rel=1e-5)
    nccl, deepep = (home(kernels=name).by_rank[1] for name in ("nccl", "deepep-2025-02"))
    pipeline = pipeline_buffer_bytes(V3, ParallelPlan(pp=16, ep=64), 4096)
    assert nccl.communication_buffers == pipeline
    assert deepep.communication_buffers == pipeline + buffers.total_bytes
    assert pipeline_buffer_bytes(V3, ParallelPlan(), 4096) == 0
    assert pipeline_buffer_bytes(V3, ParallelPlan(pp=2), 4096) == 4 * 4096 * 7168 * 2


def test_op_keeps_what_a_block_on_a_gpu_kept() -> None:
    """lab/results/2026-11-20-h200-host-launch.json.xz: 8,192 tokens, the experts' half of a layer."""
    from moesim.simulator.scoring.scoreboard.runs import MIXED, shape_of_run

    shape, plan = shape_of_run("ds16b_fsdp8_ep8_sac"), ParallelPlan(microbatch=2)
    kept = {t.name: t.bytes_per_token for t in cached_tensors(shape, "moe", MIXED, "op")}
    # torchtitan counts no router, so of the GEMMs q, kv_down, kv_up, o_proj, branch, branch, output it keeps:
    assert [name for name in kept if name.startswith("output")] == [
        "output of q_up",
        "output of kv_up",
        "output of FFN branch 0",
        "output of FFN output",
    ]
    # The measured block counted the router: it kept its scores and one branch, but not the output.
    half = ("output of FFN branch 0", "rows after dispatch and combine")
    scores = 2 * 64
    assert sum(kept[name] for name in half) + scores == 54_912 == (483_393_536 - 33_554_432) / 8192
    # Without recompute, eager kernels keep the routed rows in FP32 as well.
    eager, fused = (
        activation_bytes(shape, "moe", MIXED, "none", plan, 4096, Software(kernels=kernels))
        for kernels in ("eager", "fused")
    )
    silu, rows = 2 * (6 * 1408 + 2 * 1408), 4 * 6 * 2048
    assert eager - fused == 8192 * (silu + rows)


def test_megatrons_loss_keeps_its_softmax_alone() -> None:
    recipe = PRECISIONS["bf16"].model_copy(update={"loss": "fp32"})
    plan, tokens = ParallelPlan(tp=4, microbatch=2), 2 * 1024
    kept = {
        loss: activation_bytes(LLAMA, "head", recipe, "none", plan, 1024, Software(loss=loss))
        for loss in ("fused", "chain", "compiled")
    }
    logits = tokens * LLAMA.vocab / 4
    assert kept["fused"] - kept["chain"] == pytest.approx((2 + 2 * 4 - 4) * logits)
    assert kept["chain"] == kept["compiled"]
    assert workspace_bytes(LLAMA, "head", plan, recipe, 1024, Software(loss="chain")) == 2 * logits
    assert workspace_bytes(LLAMA, "head", plan, recipe, 1024, Software()) == 0.0


def test_placeholders_of_weight_gradients_stand_once_for_every_shape() -> None:
    def bytes_with(software: Software, layers: int) -> float:
        shape = LLAMA.model_copy(update={"n_layers": layers})
        layout = Layout(ParallelPlan(tp=2), 2, 8)
        inputs = MemoryInputs(shape, layout, PRECISIONS["bf16"], "none", 1024, 0, "nccl", software=software)
        stages = from_layers_per_stage(blocks_of(shape), (layers,))
        found = memory_by_kind(inputs, stages, [RankStages((0,), ({0: 1},))], 80e9)
        return float(found.by_kind_bytes["workspace"])

    more = [bytes_with(Software(placeholder_gradients=True), n) - bytes_with(Software(), n) for n in (2, 8)]
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    assert more == pytest.approx([2 * (layer + LLAMA.vocab * 4096) / 2] * 2)


# -- layout/test_in_flight.py -------------------------------------------------------------------


def test_1f1b_holds_one_less_on_each_later_rank() -> None:
    ranks = rank_stages(build("1f1b", 4, 8))
    assert [rank.in_flight for rank in ranks] == [({r: 4 - r},) for r in range(4)]


@pytest.mark.parametrize(("policy", "fits"), [("deepseek-v3", True), ("none", False)])
def test_home_case_with_its_schedule(policy: RecomputePolicy, fits: bool) -> None:
    shape = load_model("deepseek-v3")
    layout = Layout(ParallelPlan(pp=16, ep=64, zero_stage=1), 2048, 8)
    inputs = MemoryInputs(shape, layout, PRECISIONS["fp8"], policy, 4096, 20, "deepep-2025-02")
    stages = from_layers_per_stage(blocks_of(shape), (4,) * 15 + (1,))
    report = memory_by_kind(inputs, stages, rank_stages(build("dualpipe", 16, 120)), 80e9)
    assert report.fits is fits
