"""Perfetto traces of serving: a step adds up to its cost, and a request's life to what it waited for."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.root import main
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import load_scenario
from moesim.simulator.serving import trace
from moesim.simulator.serving.replicas import PromptChunk
from moesim.simulator.serving.simulate import Service, prepare
from moesim.simulator.serving.step import StepModel
from moesim.simulator.serving.typical import typical_step

LOAD = {"rate_per_s": 20, "requests": 40, "input_tokens": 900, "output_tokens": 12}
SCENARIO = {
    "model": "qwen3-30b-a3b",
    "cluster": {"accelerator": "h100-sxm", "nodes": 1},
    "serving": {"tp": 2, "max_num_batched_tokens": 512, "load": LOAD},
}


def service(**serving: Any) -> Service:
    return prepare(load_scenario({**SCENARIO, "serving": {**SCENARIO["serving"], **serving}}))  # type: ignore[dict-item]


def run(code: int, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "simulate", *arguments])
    assert ended.value.code == code


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def span(event: dict[str, Any]) -> tuple[int, int]:
    """Begin and end in nanoseconds, cut off as Perfetto's importer does."""
    begin = int(event["ts"] * 1000.0)
    return begin, begin + int(event["dur"] * 1000.0)


@pytest.mark.parametrize(
    "deployed", [{}, {"tp": 1, "dp": 8, "ep": 8, "exchange": "deepep", "two_batch_overlap": True}]
)
def test_a_step_is_the_sum_of_what_nothing_hides(tmp_path: Path, deployed: dict[str, Any]) -> None:
    ready = service(**deployed)
    step = typical_step(StepModel(ready.deployments[0]), ready.run())
    events = trace.step_events(StepModel(ready.deployments[0]), step)
    by: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by[event["tid"]].append(span(event))
    for spans in by.values():
        assert all(one[1] <= other[0] + 1 for one, other in pairwise(spans))
    ends = max(end for spans in by.values() for _, end in spans)
    assert ends == pytest.approx(step.cost.seconds * 1e9, abs=2)
    for thread, kinds in (
        (trace.COMPUTE, ("attention", "linear", "experts", "other")),
        (trace.EXCHANGE, ("exchange",)),
    ):
        busy = sum(part.busy_s for part in step.cost.parts if part.kind in kinds)
        drawn = sum(end - begin for begin, end in by[thread])
        assert drawn == pytest.approx(busy * 1e9, rel=1e-3)
    titles = [event["name"] for event in events if event.get("tid") == trace.LAYERS and event["ph"] == "X"]
    assert [title for title in titles if title.startswith("layer ")] == [f"layer {n}" for n in range(48)]


def test_a_layer_sends_its_rows_between_router_and_experts() -> None:
    ready = service(tp=1, dp=8, ep=8, exchange="deepep")
    step = typical_step(StepModel(ready.deployments[0]), ready.run())
    names = trace.layer_names(StepModel(ready.deployments[0]), 0, step.batch)
    order = ["attn_norm", "o_proj", "topk", "dispatch", "experts.gate_up", "experts.down", "combine"]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    assert not {part.name for part in step.cost.parts if part.name in ("dispatch", "combine")} - set(names)


def test_a_request_is_queued_computed_handed_over_and_decodes() -> None:
    ready, chunks = service(tp=1, prefill={"replicas": 2, "max_num_batched_tokens": 512}), list[PromptChunk]()
    served = ready.run(watch=chunks.append)
    assert served.last_token_ns.tolist() == ready.run().last_token_ns.tolist()  # watching changes nothing
    for request in range(len(served.arrival_ns)):
        life = trace.phases(served, request)
        assert [life[0].begin_ns, life[-1].end_ns] == [
            served.arrival_ns[request],
            served.last_token_ns[request],
        ]
        assert all(one.end_ns == other.begin_ns for one, other in pairwise(life))
        assert [phase.name for phase in life if phase.name != "queue"] == ["prefill", "transfer", "decode"]
        own = [chunk for chunk in chunks if chunk.request == request]
        assert sum(chunk.tokens for chunk in own) == served.requests.input_tokens[request]
        assert len(own) > 1 and all(chunk.prompts_only for chunk in own)
        assert (
            own[0].begin_ns == served.scheduled_ns[request]
            and own[-1].end_ns == served.first_token_ns[request]
        )


def test_the_command_writes_both_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.json").write_text(json.dumps(SCENARIO))
    paths = [tmp_path / "requests.json", tmp_path / "step.json"]
    own, options = str(tmp_path / "own.json"), ["--trace", str(paths[0]), "--step-trace", str(paths[1])]
    run(0, own, *options)
    lives, step = map(slices, paths)
    assert {event["tid"] for event in lives} == set(range(40))
    assert {event["name"].split()[0] for event in lives} == {"queue", "prefill", "decode", "chunk"}
    assert any(event["name"] == "ncclDevKernel_all_reduce" for event in step)
    nested: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in lives:
        nested[event["tid"]].append(span(event))
    for spans in nested.values():
        for begin, end in spans:
            assert all(
                e <= begin or b >= end or (b <= begin and end <= e) or (begin <= b and e <= end)
                for b, e in spans
            )
    run(2, own, "--trace", str(tmp_path / "x.txt"))
    assert "unknown extension" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"serving\.load\.requests"):
        trace.check_traced(trace.MOST_TRACED + 1)
