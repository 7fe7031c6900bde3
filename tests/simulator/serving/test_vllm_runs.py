"""The scheduler against two runs of vLLM 0.19 on RTX PRO 6000, with the token rates of every second given.

Steps inside a second take what the step model says, times a factor that makes the tokens of that second those
measured, so that only the scheduler is judged. TTFT counts from the arrival at the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from lab.packed import read
from msgspec.structs import replace

from moesim.simulator.scenario import load_scenario
from moesim.simulator.serving.replicas import PaceModel, Served, StepPace, serve_requests
from moesim.simulator.serving.requests import NS_PER_S, requests_of
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.simulate import prepare

BUDGET = 2048
FIGURE = {"kind": "assumed", "source": "two cards on PCIe", "date": "2026-11-26"}
NODE = {
    "name": "rtx-pro-6000-2",
    "title": "Two RTX PRO 6000",
    "accelerator": "rtx-pro-6000",
    "scale_up_switch": "none: PCIe",
    "gpus": {"value": 2, **FIGURE},
    "scale_up_latency": {"value": "5 us", **FIGURE},
}


class Given:
    """Steps of a model, stretched to the tokens that each second wrote and read."""

    def __init__(self, model: PaceModel, seconds: list[dict[str, float]]) -> None:
        self.model = model
        self.wrote, self.read = (
            np.cumsum([second[name] for second in seconds])
            for name in ("gen_throughput", "prompt_throughput")
        )
        self.written = self.taken = 0

    def seconds_of(self, ranks: Sequence[StepBatch]) -> float:
        return self.model.pace(0, ranks).first_ns

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        decodes = sum(batch.decodes for batch in ranks)
        alone = self.seconds_of([StepBatch(b.decodes, b.context, 0, 0, 0) for b in ranks]) if decodes else 0.0
        read = [b.prefill_tokens or 512 for b in ranks]
        beside = [
            StepBatch(b.decodes, b.context, 1, n, b.prefill_pairs or n * n // 2)
            for b, n in zip(ranks, read, strict=True)
        ]
        token = (self.seconds_of(beside) - alone) / sum(read)
        work, time, last = self.seconds_of(ranks), float(now_ns), len(self.wrote) - 1
        while True:  # through the seconds that the step touches
            second = min(int(time // NS_PER_S), last)
            end = (second + 1) * NS_PER_S if second < last else np.inf
            left = max(self.wrote[second] - self.written, 0) / max(decodes, 1) * alone
            left += max(self.read[second] - self.taken, 0) * token
            stretch = min(max((end - time) / left, 0.5), 4.0) if left and second < last else 1.0
            if time + work * stretch <= end:
                break
            work, time = work - (end - time) / stretch, end
        self.written += decodes + sum(_finished(batch) for batch in ranks)
        self.taken += sum(batch.prefill_tokens for batch in ranks)
        return StepPace(time + work * stretch - now_ns, 0.0, 1)


def _finished(batch: StepBatch) -> int:
    """Prompts that end in a step: all but one that the budget cuts."""
    return batch.prefills - (batch.prefills > 0 and batch.decodes + batch.prefill_tokens == BUDGET)


def served(model: str, dp: int, **policy: Any) -> tuple[Served, np.ndarray, list[dict[str, float]]]:
    """(what the scheduler does, measured TTFT in s, measured seconds)."""
    run = read(f"2026-04-25-vllm-0.19-{model}.json")
    rows = sorted(run["requests"], key=lambda row: row["arrival_time"])
    clock = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    arrival = np.array([row["arrival_time"] + clock for row in rows])
    requests = requests_of(
        np.rint((arrival - arrival[0]) * NS_PER_S),
        [row["input_toks"] for row in rows],
        [row["output_toks"] for row in rows],
    )
    serving = {"dp": dp, "ep": dp, "max_num_seqs": 128, "max_num_batched_tokens": BUDGET}
    cluster = {"name": "rtx", "title": "RTX", "nodes": 1, "network": "single-node", "node": NODE}
    pool = prepare(load_scenario({"model": model, "cluster": cluster, "serving": serving}), requests).pools[0]
    pool = replace(pool, policy=replace(pool.policy, **policy), times=Given(pool.times, run["seconds"]))
    ttft = np.array([row["first_token_ts"] for row in rows]) - arrival
    return serve_requests(requests, pool, sample_ns=NS_PER_S), ttft, run["seconds"]


def error(ours: float, theirs: float) -> float:
    return abs(ours / theirs - 1)


@pytest.mark.parametrize(("model", "dp"), [("llama-3-8b", 1), ("qwen3-30b-a3b", 2)])
def test_first_tokens_and_queues_are_those_of_the_run(model: str, dp: int) -> None:
    ours, ttft, seconds = served(model, dp)
    assert (
        error(float(np.median(ours.first_token_ns - ours.arrival_ns)) / NS_PER_S, float(np.median(ttft)))
        < 0.10
    )
    counts = np.array(ours.counts)[: len(seconds)]
    for column, name in ((1, "running"), (2, "waiting")):
        theirs = np.array([second[name] for second in seconds])[: len(counts)]
        assert np.abs(counts[:, column] - theirs).mean() < 0.10 * theirs.mean(), name


def test_without_steps_planned_ahead_first_tokens_come_too_early() -> None:
    ours, ttft, _ = served("qwen3-30b-a3b", 2, ahead=False)
    assert np.median(ours.first_token_ns - ours.arrival_ns) / NS_PER_S < 0.7 * np.median(ttft)
