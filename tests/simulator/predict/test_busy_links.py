"""What `busy:` says of links equals the bytes of all transfers and collectives, summed by hand."""

from __future__ import annotations

import random
from math import comb
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.evidence import EXPERTS, SENDS, SHARDS
from moesim.simulator.engine.bounds import moved_by_rank
from moesim.simulator.engine.link_map import PORTS_PER_GPU
from moesim.simulator.predict.report import moved_bytes, utilisation
from moesim.simulator.predict.result_parts import Utilisation
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.predict.summarise import summarise
from moesim.simulator.scenario import Scenario, load_scenario

H100_NIC, H100_NVLINK = 50e9, 450e9
"""Bytes/s of a GPU's 400 Gb/s NIC and of its NVLink ports, per direction."""


def scenario(model: str | dict[str, Any], nodes: int, parallel: dict[str, Any], **more: Any) -> Scenario:
    given = {"model": model, "cluster": {"accelerator": "h100-sxm", "nodes": nodes}, "parallel": parallel}
    software = {"framework": "none", **more.pop("software", {})}
    return Scenario.model_validate({**given, "software": software, **more})


def check_busy(
    used: Utilisation, step: float, nic_bytes: float, scale_up_bytes: float, rel: float = 1e-6
) -> None:
    """Busy share times rate times step are these bytes, and nothing works longer than the step."""
    assert used.nic * H100_NIC * step == pytest.approx(nic_bytes, rel=rel, abs=1e-3)
    assert used.scale_up * H100_NVLINK * step == pytest.approx(scale_up_bytes, rel=rel, abs=1e-3)
    shares = (used.nic, used.scale_up, used.compute_partition, used.communication_partition)
    assert all(0.0 <= share <= 1.0 for share in shares), shares


# -- three cases by hand -------------------------------------------------------------------------------


def test_five_lines_by_hand() -> None:
    """Qwen3-30B-A3B on 32 H100 with EP8: all experts' gradients and parameters cross the NICs.

    48 layers of hidden 2,048: attention 2 x 2,048 x 4,096 + 2 x 2,048 x 512, norms 2 x 2,048 + 2 x 128,
    router 2,048 x 128; 128 experts of 3 x 2,048 x 768, of which a GPU holds 16. Embedding and head: 151,936
    x 2,048 each.
    """
    result = summarise(run_step(load_scenario("examples/five-lines.yaml", ["software.framework=none"])))
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 2048 + 2 * 128 + 2048 * 128
    dense = 48 * layer + 2 * 151936 * 2048 + 2048
    expert = 48 * 16 * 3 * 2048 * 768
    # Rings: dense over 32 GPUs, 8 of them on a node with 8 NICs; an expert over its 4 copies on 4 nodes.
    ring_nic = dense * 31 / 32 / 8 + expert * 3 / 4
    ring_up = dense * 31 / 32 * 7 / 8
    norm = 2 * 4.0 * 31 / 32  # one FP32 number
    nic = ring_nic * (4 + 2) + norm / 8  # FP32 gradients, BF16 parameters
    # 16 micro-batches of 4,096 tokens, each once to every one of 7 GPUs that holds one of its 8 experts.
    others = 7 * (1 - comb(112, 8) / comb(128, 8))
    experts = 16 * 48 * 4 * 4096 * others * 2048 * 2  # dispatch and combine, forward and backward, in BF16
    check_busy(result.utilisation, result.step.time_s, nic, experts + ring_up * (4 + 2) + norm * 7 / 8)
    assert nic == pytest.approx(17.43e9, rel=1e-3)
    # 0.349 s of a 50 GB/s NIC in a step of 5.18 s.
    assert result.utilisation.nic == pytest.approx(0.0673, abs=0.001)


def test_qwen3_235b_on_64_h100_by_hand() -> None:
    """94 layers of hidden 4,096, 64 heads of 128 (4 of them for keys), 128 experts of width 1,536, EP8."""
    batch = {"sequences": 64, "sequence_length": 4096}
    plan = scenario("qwen3-235b-a22b", 8, {"ep": 8, "zero_stage": 1}, batch=batch)
    result = summarise(run_step(plan))
    layer = 2 * 4096 * 8192 + 2 * 4096 * 512 + 2 * 4096 + 2 * 128 + 4096 * 128
    dense = 94 * layer + 2 * 151936 * 4096 + 4096
    expert = 94 * 16 * 3 * 4096 * 1536  # 28.4 G parameters on a GPU, 8 copies on 8 nodes
    nic = (dense * 63 / 64 / 8 + expert * 7 / 8) * (4 + 2)
    others = 7 * (1 - comb(112, 8) / comb(128, 8))
    experts = 94 * 4 * 4096 * others * 4096 * 2
    check_busy(result.utilisation, result.step.time_s, nic, experts + dense * 63 / 64 * 7 / 8 * (4 + 2))
    # 155 GB are 3.1 s of a 50 GB/s NIC at its nominal rate, in a step that the reduction and gather dominate.
    assert nic == pytest.approx(154.9e9, rel=1e-3)
    assert result.utilisation.nic > 0.5


def test_llama_405b_with_tp8_by_hand() -> None:
    """126 layers of hidden 16,384 over 8 stages; sequence parallelism gathers and scatters around each half.

    128 heads of 128 (8 of them for keys), FFN of 53,248, vocabulary of 128,256; TP8 splits all but the norms.
    """
    plan = {"tp": 8, "pp": 8, "zero_stage": 1, "sequence_parallel": True}
    batch = {"sequences": 64, "sequence_length": 8192}
    result = summarise(run_step(scenario("llama-3.1-405b", 64, plan, batch=batch)))
    microbatches, activation = 64 // 8, 8192 * 16384 * 2
    # Two gathers and two scatters in the forward of a layer, as many in its backward.
    tensor = microbatches * 126 / 8 * 8 * activation * 7 / 8
    # Activations and gradients cross 7 of 8 borders, in 8 parts of the sequence.
    sends = microbatches * 2 * 7 / 8 * activation / 8
    layer = (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248) / 8 + 2 * 16384
    held = (126 * layer + 2 * 128256 * 16384 / 8 + 16384) / 8
    norm = 2 * 4.0 * 511 / 512
    rings = held * 7 / 8 * (4 + 2)  # 8 copies on 8 nodes
    # The model splits the norms, too, which are 0.01 % of the parameters.
    check_busy(
        result.utilisation, result.step.time_s, sends + rings + norm / 8, tensor + norm * 7 / 8, rel=1e-4
    )
    assert result.utilisation.scale_up > 0.05


# -- transfers that an engine runs -----------------------------------------------------------------------


def check_carried(step: ExecutedStep) -> None:
    """On every rank, the transfers and sends of the list are the bytes that the engine put on the links."""
    (execution,) = step.executions
    for rank, rows in enumerate(moved_by_rank(execution.tasks)):
        moved = [row for row in rows if row.what in (EXPERTS, SENDS, SHARDS)]
        ports = execution.carried_bytes[PORTS_PER_GPU * rank :][:PORTS_PER_GPU:2]
        for size, name in zip(ports.tolist(), ("nic_bytes", "scale_up_bytes"), strict=True):
            assert sum(getattr(row, name) for row in moved) == pytest.approx(size, rel=1e-9)


def test_rows_that_capacity_drops_cross_no_link(small: Scenario) -> None:
    step, whole = run_step(small.overridden("routing.capacity={factor: 1.0}")), run_step(small)
    check_carried(step)
    check_carried(whole)
    moved, all_rows = (
        utilisation(s.executions, moved_bytes(s.executions), 50e9, 160e9).nic * s.time_s
        for s in (step, whole)
    )
    assert moved < 0.99 * all_rows


def test_every_pool_of_a_fleet_moves_its_own_bytes(mixed: Scenario) -> None:
    check_carried(run_step(mixed))


# -- random scenarios ----------------------------------------------------------------------------------


def drawn(seed: int) -> Scenario:
    """A small scenario of four layers, which may be no legal plan."""
    draw = random.Random(seed).choice
    moe, tied = draw([True, True, False]), draw([True, False])
    attention = {"kind": "gqa", "heads": 16, "kv_heads": draw([8, 16]), "head_dim": 128}
    model: dict[str, Any] = {"name": "tiny", "n_layers": 4, "hidden": 2048, "vocab": 50304}
    model |= {"attention": attention, "tied_embeddings": tied, "dense_ffn": 5120}
    model["source"] = {"kind": "assumed", "reference": "a test", "date": "2026-11-25"}
    if moe:
        shared = {"shared_experts": 1, "shared_ffn": 512} if draw([True, False]) else {}
        model["moe"] = {"experts": 64, "top_k": 8, "expert_ffn": 1024, "scoring": "softmax", **shared}
        model["moe"]["dense_layers"] = [0] if draw([True, False]) else []
    tp, nodes = draw([1, 1, 2, 4, 8]), draw([1, 2, 4])
    plan: dict[str, Any] = {"tp": tp, "cp": draw([1, 1, 2]), "pp": draw([1, 1, 2, 4])}
    plan |= {"ep": draw([1, 2, 4, 8, 16]), "expert_tp": draw([1, tp])} if moe else {}
    plan |= {"zero_stage": draw([0, 1, 2, 3]), "sequence_parallel": tp > 1 and (moe or draw([True, False]))}
    more: dict[str, Any] = {
        "recompute": draw(["none", "full", "op", "selective"]),
        "precision": draw(["bf16", "fp8"]),
        "communication": {"kernels": draw(["deepep-2025-02", "nccl", "nccl-allgather"])},
        "software": {
            "overlap_data_parallel": draw([True, False]),
            "overlap_tensor_parallel": draw(["none", "weight-gradient", "full", "userbuffers", "async"]),
            "overlap_context_parallel": draw([True, False]),
            "end_collectives": draw([True, False]),
            "data_parallel_buckets": draw(["layer", "megatron"]),
        },
    }
    more["schedule"] = draw(["1f1b", "gpipe", "zb-h1"]) if plan["pp"] > 1 else "1f1b"
    batch = {"sequences": draw([1, 2]) * nodes * 8, "sequence_length": 2048}
    return scenario(model, nodes, plan, batch=batch, **more)


def by_hand(step: ExecutedStep) -> tuple[float, float]:
    """(NIC, scale-up) bytes of an average GPU: expert rows and sends of the engine, and each collective."""
    prepared = step.prepared
    s, shape, layout = prepared.scenario, prepared.shape, prepared.layout
    plan, recipe, software = s.parallel, s.recipe, s.software
    node, n_gpus = 8, prepared.n_gpus
    nic = up = 0.0

    def ring(size: float, ranks: int, local: int, times: float = 1.0) -> None:
        nonlocal nic, up
        moved = times * size * (ranks - 1) / ranks
        local = min(local, ranks)
        nic += moved / local if ranks > local else 0.0
        up += moved * (local - 1) / local if ranks > local else moved

    for by_rank in moved_by_rank(step.executions[0].tasks):
        sent = [row for row in by_rank if row.what in (EXPERTS, SENDS)]
        nic += sum(row.nic_bytes for row in sent) / plan.pp
        up += sum(row.scale_up_bytes for row in sent) / plan.pp
    microbatches = s.batch.sequences // layout.dp
    tokens = 2048 // plan.cp
    full, fp8 = s.recompute == "full", {"bf16": 2.0, "fp8": 1.0}
    dense = expert = 0.0
    for kind in (block.kind for stage in prepared.stages.stages for block in stage):
        block = shape.block(kind)
        own = prepared.pricer.block_parameters(kind)
        dense, expert = dense + own[0] / plan.pp, expert + own[1] / plan.pp
        each = microbatches / plan.pp  # passes of this block on an average pipeline rank
        if block.layer is None:
            if software.end_collectives and plan.tp > 1:
                rows, group = tokens * shape.hidden * 2.0, (plan.tp, node)
                if block.is_embedding:
                    ring(rows, *group, 2 * each)
                else:
                    ring(tokens * 4.0, *group, 2 * 3 * each)
                    ring(rows, *group, (3 if plan.sequence_parallel else 2) * each)
            continue
        for half in (block.layer.attention, block.layer.feed_forward):
            routed = half is block.layer.feed_forward and block.routed
            if plan.tp == 1 or half.empty or (routed and not (shape.moe and shape.moe.shared_experts)):
                continue
            rows = tokens * shape.hidden * 2.0
            if not plan.sequence_parallel:
                ring(rows, plan.tp, node, 2 * (2 + full) * each)
                continue
            gathered = rows / 2.0 * fp8[recipe.tensor_gather]
            again = software.overlap_tensor_parallel not in ("none", "async")
            ring(gathered, plan.tp, node, (2 + again + full) * each)
            ring(rows, plan.tp, node, (2 + full) * each)
        if plan.cp > 1:
            size = 2048 * block.layer.attention.context_elements(2048) / plan.tp * 2.0
            ring(size, plan.cp, max(1, node // plan.tp), (2 + full) * each)
        if block.routed and shape.moe is not None:
            repeated = s.recompute == "full" or (s.recompute == "op" and not software.op_keeps_transfers)
            if plan.expert_tp > 1:
                rows = tokens / plan.tp * shape.moe.routed_rows * plan.expert_tp * shape.routed_width * 2.0
                ring(rows, plan.expert_tp, node, 2 * (2 + (s.recompute == "full")) * each)
            if repeated and plan.ep > 1:
                for phase in ("dispatch F", "combine F"):
                    cost = prepared.program.costs.transfer[kind, phase, "alone"]
                    nic, up = nic + each * cost.nic_bytes, up + each * cost.scale_up_bytes
    # Stages 0 to 2: a reduce-scatter and an all-gather a step; without shards both are of gradients, as an
    # all-reduce. Shards of gradients that add up over micro-batches are scattered in each of them (eq. X32),
    # and ZeRO-3 gathers parameters in the forward and the backward of each.
    size = {"bf16": 2.0, "fp32": 4.0}[recipe.gradient_reduce]
    gather = size if plan.zero_stage == 0 else {"bf16": 2.0, "fp8": 1.0}[recipe.parameter_gather]
    scatters = microbatches if plan.zero_stage >= 2 else 1
    gathers = 2 * microbatches if plan.zero_stage == 3 else 1
    moved = scatters * size + gathers * gather
    copies, one_node = layout.dp * plan.cp, n_gpus == node
    ring(dense * moved, copies, copies if one_node else node // plan.tp)
    local = layout.expert_dp if one_node else max(1, node // (plan.ep * plan.expert_tp))
    ring(expert * moved, layout.expert_dp, local)
    if shape.tied_embeddings and plan.pp > 1 and software.tied_tables_reduced:
        table = shape.vocab * shape.hidden / plan.tp * {"bf16": 2.0, "fp32": 4.0}[recipe.gradients]
        ring(table, 2, 2 if n_gpus <= node else 1, 2 * 2 / plan.pp)
    ring(4.0, n_gpus, node, 2.0)
    return nic, up


def test_busy_links_are_the_bytes_of_random_steps() -> None:
    checked = seed = 0
    while checked < 60:
        seed += 1
        try:
            plan = drawn(seed)
            step = run_step(plan)
        except InputError:
            continue  # no legal plan
        used = utilisation(
            step.executions,
            moved_bytes(step.executions),
            H100_NIC if plan.machine.nodes > 1 else 0.0,
            H100_NVLINK,
        )
        check_busy(used, step.time_s, *by_hand(step))
        checked += 1
    assert seed < 180
