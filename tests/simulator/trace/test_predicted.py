from __future__ import annotations

import numpy as np
import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.predict.trace import COMPUTE, DATA_PARALLEL
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trace import CLASSES, PHASES
from moesim.simulator.trace.predicted import RECEIVES, START_NS, predicted_trace

HOST = [
    "parallel={pp: 1, ep: 2, microbatch: 1, zero_stage: 3}", "stages.blocks=null", "schedule=1f1b",
    "cluster=h200-8", "batch.sequences=8", "communication.kernels=nccl", "precision=bf16",
    "software.framework=torchtitan-0.2", "software.host=emerald-rapids-vm", "recompute=full",
]  # fmt: skip


@pytest.fixture(scope="module")
def dualpipe(small: Scenario) -> ExecutedStep:
    return run_step(small)


def test_operators_fill_what_the_engine_gave_each_phase_to_the_nanosecond(dualpipe: ExecutedStep) -> None:
    execution = dualpipe.executions[0]
    trace = predicted_trace(dualpipe)
    assert [rank.raw.rank for rank in trace.ranks] == [0, 16, 32, 48]
    for number, rank in enumerate(trace.ranks):
        given = 0
        first, last = execution.table.first_action[number : number + 2].tolist()
        for step in execution.table.steps[first:last]:
            for task in step.code.tasks:
                if task.transfer is None:
                    own = int(task.rows_ns[step.microbatches[task.side], 0])
                    given += own - min(own, round(task.price.exposed_s * 1e9))
        start, end = execution.syncs[number].optimizer
        events = rank.events
        assert ((events["end"] - events["start"])[events["stream"] == COMPUTE]).sum() == given + end - start
        assert rank.steps[0]["wall_ns"] == execution.end_ns
        assert sum(rank.steps[0]["idle_by_cause_ns"].values()) == rank.steps[0]["idle_ns"]


def test_no_two_events_of_a_stream_overlap_and_all_lie_in_the_step(dualpipe: ExecutedStep) -> None:
    for rank in predicted_trace(dualpipe).ranks:
        assert rank.events["start"].min() >= START_NS
        assert rank.events["end"].max() <= START_NS + dualpipe.executions[0].end_ns
        for stream in np.unique(rank.events["stream"]):
            own = rank.events[rank.events["stream"] == stream]
            assert (own["start"][1:] >= own["end"][:-1]).all()


def test_events_have_classes_phases_layers_microbatches_and_shapes(dualpipe: ExecutedStep) -> None:
    rank = predicted_trace(dualpipe, [17]).ranks[0]
    assert rank.raw.rank == 17  # shown as the first of its pipeline rank
    found = {(CLASSES[e["cls"]], PHASES[e["phase"]]) for e in rank.events if e["stream"] != DATA_PARALLEL}
    assert {("ep_dispatch", "forward"), ("ep_dispatch", "backward"), ("ep_notify", "forward"),
            ("attention_forward", "forward"), ("clip", "optimizer")} <= found  # fmt: skip
    products = rank.events[rank.events["cls"] == CLASSES.index("attention_forward")]
    assert set(products["layer"].tolist()) == {2, 3, 4, 5}  # both directions of the pipeline
    assert len(set(products["microbatch"].tolist())) == 8
    shapes = {rank.names[n] for n in rank.events["shape"][rank.events["cls"] == CLASSES.index("gemm")]}
    assert "4096x24576x1536" in shapes


def test_a_rank_that_waits_for_its_input_receives(dualpipe: ExecutedStep) -> None:
    last = predicted_trace(dualpipe).ranks[1]
    waits = last.events[last.events["stream"] == RECEIVES]
    assert len(waits) and int(waits["start"].min()) == START_NS
    assert {CLASSES[n] for n in waits["cls"]} == {"send_recv"}


def test_a_late_host_is_a_gap_with_its_cause() -> None:
    step = run_step(load_scenario("mixtral-8x7b-64xh100", HOST))
    row = predicted_trace(step).ranks[0].steps[0]
    assert row["idle_by_cause_ns"]["launch_bound"] > 0.9 * row["idle_ns"] > 0


def test_a_gpu_that_is_not_there_is_refused(dualpipe: ExecutedStep) -> None:
    with pytest.raises(InputError, match="GPUs 0 to 63"):
        predicted_trace(dualpipe, [64])
