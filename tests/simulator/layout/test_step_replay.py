"""Steps under FSDP2 against small models on an H200, none of a scored width, and what a plan gets."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from lab import packed

from moesim.hwmodels.errors import InputError
from moesim.simulator.frameworks.software import Software
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block, StageAssignment
from moesim.simulator.memory.allocator import AllocatorBytes
from moesim.simulator.memory.eager_tape import (
    EagerOp,
    Tape,
    eager_block,
    run_backward,
    run_forward,
    run_weights,
)
from moesim.simulator.memory.fsdp2 import replayed_peaks
from moesim.simulator.memory.gpu import MemoryInputs
from moesim.simulator.model.attention import GQA, MLA
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import build

RESULTS = "2026-11-22-h200-allocator.json"
MIXED = Precision(
    linear="bf16", parameters="fp32", loss="fp32", gradient_reduce="fp32", parameter_gather="bf16"
)


@cache
def measured() -> dict[str, Any]:
    loaded: dict[str, Any] = packed.read(RESULTS)
    return loaded


def shape_of(case: dict[str, Any]) -> ModelShape:
    """The model of a case in the study."""
    attention: GQA | MLA = GQA(
        heads=case["heads"], kv_heads=case["kv_heads"], head_dim=case["hidden"] // case["heads"]
    )
    moe = None
    if case["mla"]:
        attention = MLA(heads=case["heads"], kv_lora_rank=384, qk_nope_dim=96, qk_rope_dim=32, v_dim=96)
        moe = MoE(
            experts=case["experts"],
            top_k=case["top_k"],
            expert_ffn=case["expert_ffn"],
            shared_experts=1,
            shared_ffn=case["shared_ffn"],
            scoring="softmax",
            dense_layers=(0,),
        )
    return load_model("llama-3-8b").model_copy(
        update={
            "n_layers": case["layers"],
            "hidden": case["hidden"],
            "vocab": case["vocabulary"],
            "attention": attention,
            "moe": moe,
            "dense_ffn": case["ffn"],
        }
    )


def replayed(case: dict[str, Any], **more: Any) -> AllocatorBytes | str:
    """Predicted peaks of a case; `more` replaces fields of the inputs or of the plan."""
    plan = ParallelPlan(microbatch=case["microbatch"], ep=case["ep"] if case["mla"] else 1, zero_stage=3)
    plan = plan.model_copy(update={k: v for k, v in more.items() if k in ParallelPlan.model_fields})
    kinds = ["embedding", "dense", *["moe" if case["mla"] else "dense"] * (case["layers"] - 1), "head"]
    blocks = tuple(Block(kind, None if kind in ("embedding", "head") else 0) for kind in kinds)
    software = Software(
        kernels="eager",
        parameters_copied=True,
        allocator="expandable" if case["expandable"] else "segments",
        loss="compiled" if case["loss"] == "compiled" else "fused",
    )
    inputs = MemoryInputs(
        more.get("shape", shape_of(case)),
        Layout(plan, case["ranks"], case["ranks"]),
        more.get("precision", MIXED),
        more.get("recompute", case["recompute"]),
        case["sequence"],
        0,
        "nccl",
        software=software,
    )
    return replayed_peaks(inputs, StageAssignment((blocks,)), build("1f1b", 1, 1), 0)


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("dense, op", 0.01),
        ("dense, none", 0.01),
        ("dense, full", 0.01),
        ("dense, op, expandable", 0.001),
        ("moe, none", 0.02),
        ("moe, full", 0.06),
        ("dense, op, compiled loss", 0.02),
    ],
)
def test_peaks_are_those_that_torch_counted(name: str, fragments: float) -> None:
    """Peak active bytes within 0.2 %; peak reserved bytes within what the holes between blocks leave open."""
    model = measured()["models"][name]
    peaks = replayed(model["case"])
    assert isinstance(peaks, AllocatorBytes)
    assert peaks.active == pytest.approx(max(row[2] for row in model["marks"][1:]), rel=2e-3)
    assert peaks.reserved == pytest.approx(max(row[4] for row in model["marks"][1:]), rel=fragments)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_input_gradients_leave_for_w_what_torch_left(policy: str) -> None:
    """Four layers: without recompute all saved tensors stay with the gradients, with `full` these alone."""
    found = measured()[f"split backward, {policy}"]
    case = found["case"]
    tokens = case["sequence"] * case["microbatch"]
    ops = eager_block(shape_of(case), shape_of(case).block("dense"), tokens, 1)
    assert ops is not None
    tape, sizes = Tape(), dict[int, int]()

    def held() -> int:
        for event in tape.events:
            if event.kind == "allocate":
                sizes[event.tensor] = event.size_bytes
        return sum(n if e.kind == "allocate" else -n for e in tape.events for n in [sizes[e.tensor]])

    def nothing(*_: object) -> None:
        """No unit is sharded."""

    x = tape.new(2 * tokens * case["hidden"])
    y, frames = tape.hold(x), []
    before = held()
    for _ in range(case["layers"]):
        after, frame = run_forward(tape, ops, y, "all" if policy == "none" else "none", nothing, nothing)
        tape.drop(y)
        y = after
        frames.append(frame)
    assert held() - before == pytest.approx(found["forward"], rel=1e-4)
    gradient, waiting = tape.new(found["gradient"]), []
    for frame in reversed(frames):
        gradient, weights, later = run_backward(tape, ops, frame, gradient, nothing, nothing, True)
        assert not weights
        waiting.append(later)
    assert held() - before == pytest.approx(found["input_gradients"], rel=1e-4)
    tape.drop(y)
    for later in waiting:
        tape.drop_all(run_weights(tape, ops, later)[0])
    tape.drop(gradient)
    assert held() == before


@pytest.mark.parametrize("compiled", [False, True])
def test_a_waiting_micro_batch_keeps_the_measured_bytes_of_a_logit(compiled: bool) -> None:
    from moesim.simulator.memory.activations import activation_bytes
    from moesim.simulator.memory.rank_bytes import workspace_bytes

    row = measured()[f"waiting logits, compiled {compiled}"]
    shape = load_model("llama-3-8b").model_copy(update={"vocab": row["vocabulary"], "hidden": row["hidden"]})
    software = Software(kernels="eager", loss="compiled" if compiled else "fused")
    for pp, held in ((1, row["kept"]), (2, row["kept_with_logits"])):
        plan = ParallelPlan(pp=pp)
        waiting = activation_bytes(shape, "head", MIXED, "none", plan, 1024, software)
        waiting -= 1024 * 2 * 2 * row["hidden"]  # inputs of the norm and of the GEMM
        logits = 1024 * row["vocabulary"]
        assert waiting / logits == pytest.approx(held, rel=1e-3)
        work = workspace_bytes(shape, "head", plan, MIXED, 1024, software)
        peak = row["backward_peak"] + (row["kept_with_logits"] - row["kept"]) * (pp > 1)
        assert (waiting + work) / logits == pytest.approx(peak, rel=1e-3)


def test_a_gradient_is_added_into_one_that_nobody_else_holds() -> None:
    ops = (
        EagerOp("a", ("x",), 1024.0, saves=("x",), gradients=(("x", 1024.0),)),
        EagerOp("y", ("x", "a"), 1024.0, gradients=(("x", 0.0), ("a", 0.0))),
    )
    tape = Tape()

    def nothing(*_: object) -> None:
        """No unit is sharded."""

    x = tape.new(1024.0)
    y, frame = run_forward(tape, ops, x, "all", nothing, nothing)
    gradient, _, _ = run_backward(tape, ops, frame, tape.new(1024.0), nothing, nothing)
    tape.drop_all([x, y, gradient])
    live = {event.tensor for event in tape.events if event.kind == "allocate"}
    assert live == {event.tensor for event in tape.events if event.kind == "free"}
    assert len(live) == 5  # x, a, y, the gradient of y, and one of `a`, which joins it


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tp": 2}, "tensor and context parallelism"),
        ({"zero_stage": 1}, "zero_stage 2 and 3"),
        ({"precision": PRECISIONS["bf16"]}, "mixed precision"),
        ({"recompute": "selective"}, "recompute policies"),
    ],
)
def test_what_is_not_described_says_why(more: dict[str, Any], reason: str) -> None:
    found = replayed(measured()["models"]["dense, op"]["case"], **more)
    assert isinstance(found, str) and reason in found


def test_blocks_that_are_not_described_say_so() -> None:
    case = measured()["models"]["dense, op"]["case"]
    unrotated = GQA(heads=24, kv_heads=8, head_dim=128, rotary=False)
    found = replayed(case, shape=shape_of(case).model_copy(update={"attention": unrotated}))
    assert isinstance(found, str) and "operators" in found


def test_the_allocator_of_other_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="allocator=segments replays eager kernels under FSDP2"):
        Software(allocator="segments")
    from moesim.simulator.predict.driver import simulate
    from moesim.simulator.scenario import load_scenario

    with pytest.raises(InputError, match="kernels: eager"):
        simulate(load_scenario("deepseek-v3-2048xh800", ["software={allocator: segments}"]))


def test_what_waits_for_w_costs_memory_behind_the_first_stage() -> None:
    """The first stage leaves its whole backward to W, so it keeps no more than its activations."""
    shape = shape_of(measured()["models"]["dense, none"]["case"])
    layers = tuple(Block("dense", n) for n in range(3))
    stages = StageAssignment(
        ((Block("embedding"), *layers), layers, layers, (*layers, Block("head"))),
    )
    software = Software(kernels="eager", parameters_copied=True, allocator="expandable")
    layout = Layout(ParallelPlan(pp=4, zero_stage=2), 8, 8)
    inputs = MemoryInputs(shape, layout, MIXED, "none", 4096, 0, "nccl", software=software)
    active: dict[str, list[int]] = {}
    for name in ("1f1b", "zb-h1"):
        peaks = [replayed_peaks(inputs, stages, build(name, 4, 8), rank) for rank in range(4)]
        active[name] = [p.active for p in peaks if isinstance(p, AllocatorBytes)]
    more = [later - whole for whole, later in zip(active["1f1b"], active["zb-h1"], strict=True)]
    assert more[0] < min(more[1:3]) and min(more[1:3]) > 0
