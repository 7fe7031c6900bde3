"""Perfetto traces of serving: the operators of one step of an engine, and the lives of requests.

A step has a process with one thread a stream; parts of `StepCost` are spread evenly over the layers that have
them, in the order of the layer. Requests have a thread each: queue, prompt with its chunks inside, hand-over
and decode. Times are those of the step model and of the events; nothing is drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.trace import Event, microseconds, trace_path, write_events
from moesim.simulator.serving.linear import StepRows
from moesim.simulator.serving.operators import ExpertLoad, layer_operators
from moesim.simulator.serving.replicas import PromptChunk, Served
from moesim.simulator.serving.requests import NS_PER_S
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.simulate import Service
from moesim.simulator.serving.step import StepModel, StepPart
from moesim.simulator.serving.typical import TypicalStep, typical_step

MOST_TRACED = 100_000
"""Requests of a trace; Perfetto reads so many in about a minute."""

FIRST = ("embedding",)
"""Operators of a step before its layers; what belongs to no layer else comes after them."""


class LifePhase(NamedTuple):
    """A part of a request's life, in ns after the first arrival."""

    name: str
    begin_ns: int
    end_ns: int


def phases(served: Served, request: int) -> tuple[LifePhase, ...]:
    """The life of a request; a hand-over is there with a pool for prompts only.

    Decode of a request that was handed over begins with its wait for a place in the other pool.
    """
    arrival, begun, first, last = (
        int(column[request])
        for column in (served.arrival_ns, served.scheduled_ns, served.first_token_ns, served.last_token_ns)
    )
    moved = max(int(served.transfer_ns[request]), 0)
    all_parts = (
        LifePhase("queue", arrival, begun),
        LifePhase("prefill", begun, first),
        LifePhase("transfer", first, first + moved),
        LifePhase("decode", first + moved, last),
    )
    return tuple(phase for phase in all_parts if phase.end_ns > phase.begin_ns)


def title(served: Served, request: int) -> str:
    """Number and lengths of a request."""
    requests = served.requests
    lengths = f"{requests.input_tokens[request]:,} in, {requests.output_tokens[request]:,} out"
    return f"request {request} ({lengths})"


# -- trace of a step ---------------------------------------------------------------------------------

LAYERS, COMPUTE, EXCHANGE, HOST = range(4)
THREADS = ("layers", "compute stream", "exchange stream", "host, exposed")


def layer_names(model: StepModel, index: int, batch: StepBatch) -> list[str]:
    """Names of the parts of a decode step that a layer has, in the order in which they run."""
    deployment = model.deployment
    rows = StepRows(batch.decodes, batch.decodes, 0.0, 0.0, batch.context, 0.0)
    load = ExpertLoad.of(deployment.shape.moe, deployment.split, batch.decodes * deployment.pool.dp)
    parts = layer_operators(deployment.shape, index, rows, deployment.split, load)
    halves = [[op.name for op in ops] for name, ops in parts if name != "attention"]
    names = [op.name for name, ops in parts if name == "attention" for op in ops] + ["all_reduce"]
    after = [name for half in halves for name in half]
    at = next((n for n, name in enumerate(after) if name.startswith("experts.")), None)
    if at is None:
        return [*names, *after, "all_reduce"]
    return [
        *names,
        *after[:at],
        "dispatch",
        "all_gather",
        *after[at:],
        "combine",
        "reduce_scatter",
        "all_reduce",
    ]


def _sections(model: StepModel, step: TypicalStep) -> Iterator[tuple[str, list[tuple[StepPart, int]]]]:
    """Titles with their parts and over how many such places each is spread."""
    parts = {part.name: part for part in step.cost.parts}
    named = [layer_names(model, n, step.batch) for n in range(len(model.deployment.shape.layers))]
    layers = [[name for name in names if name in parts] for names in named]
    times = {name: sum(names.count(name) for names in layers) for name in parts}
    yield "before the layers", [(parts[name], 1) for name in FIRST if name in parts]
    for number, names in enumerate(layers):
        yield f"layer {number}", [(parts[name], times[name]) for name in names]
    rest = [part for part in step.cost.parts if not times[part.name] and part.name not in FIRST]
    for title, drafts in (("after the layers", False), ("drafts", True)):
        own = [(p, 1) for p in rest if p.kind != "host" and p.name.startswith("draft.") == drafts]
        yield title, own
    yield "host", [(part, 1) for part in rest if part.kind == "host"]


def step_events(model: StepModel, step: TypicalStep) -> list[Event]:
    """Slices of a step; what of an exchange nothing hides delays the stream of compute."""
    events, now, sent, end = _names(1, f"decode step: {step.words}", THREADS), 0.0, 0.0, step.cost.seconds
    for title, parts in _sections(model, step):
        began = now
        for part, times in parts:
            busy, exposed = part.busy_s / times, part.exposed_s / times
            args = {"class": part.kind, "busy us": busy * 1e6, "exposed us": exposed * 1e6}
            if part.kind == "exchange":
                start = max(sent, now - max(busy - exposed, 0.0))
                sent, now = min(start + busy, end), now + exposed
                events += _slice(1, EXCHANGE, f"ncclDevKernel_{part.name}", start, sent, args)
                continue
            thread = HOST if part.kind == "host" else COMPUTE
            events += _slice(1, thread, part.name, now, now + exposed, args)
            now += exposed
        events += _slice(1, LAYERS, title, began, now, {})
    return events


def write_step_trace(path: str | Path, service: Service, served: Served) -> TypicalStep:
    """Write the trace of the load's typical decode step; returns the step.

    Raises InputError for a path that cannot be written, and for a load without a second token.
    """
    path, step = trace_path(path), typical_step(StepModel(service.deployments[0]), served)
    head = _head(service, {"step": step.words, "step us": step.cost.seconds * 1e6})
    write_events(path, head, step_events(StepModel(service.deployments[0]), step))
    return step


# -- trace of requests -------------------------------------------------------------------------------


def request_events(served: Served, chunks: Iterable[PromptChunk]) -> Iterator[Event]:
    """A thread a request with the phases of its life, chunks of its prompt inside, and counts over time."""
    titles = [title(served, request) for request in range(len(served.arrival_ns))]
    yield from _names(1, "requests", titles)
    for request in range(len(titles)):
        where = {"rank": int(served.rank[request]), "prefill rank": int(served.prefill_rank[request])}
        args = {name: rank for name, rank in where.items() if rank >= 0}
        for name, begin, end in phases(served, request):
            yield from _slice(1, request, name, begin / NS_PER_S, end / NS_PER_S, args)
    for chunk in chunks:
        args = {"tokens": chunk.tokens, "prefill rank" if chunk.prompts_only else "rank": chunk.rank}
        name = f"chunk of {chunk.tokens:,}"
        yield from _slice(1, chunk.request, name, chunk.begin_ns / NS_PER_S, chunk.end_ns / NS_PER_S, args)
    for time, running, waiting, *_ in served.counts:
        place = {"pid": 1, "tid": 0, "ts": microseconds(time)}
        yield {"ph": "C", "name": "sequences", **place, "args": {"running": running, "waiting": waiting}}


def write_request_trace(
    path: str | Path, service: Service, served: Served, chunks: Sequence[PromptChunk]
) -> None:
    """Write the lives of a load's requests; `chunks` are those that `Service.run` told.

    Raises InputError for a path that cannot be written, and for more requests than Perfetto shows.
    """
    path, count = trace_path(path), len(served.arrival_ns)
    check_traced(count)
    write_events(path, _head(service, {"requests": count}), request_events(served, chunks))


def check_traced(count: int) -> None:
    """Raise InputError for more requests than a trace may hold."""
    if count > MOST_TRACED:
        raise InputError(
            f"a trace of {count:,} requests is more than Perfetto shows ({MOST_TRACED:,}): trace fewer, "
            "with serving.load.requests",
            key="serving.load.requests",
            nearest=[MOST_TRACED],
        )


def _head(service: Service, notes: dict[str, Any]) -> dict[str, Any]:
    scenario = service.scenario
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": scenario.name,
        "moesim": {"seed": scenario.seed, "engine": service.serving.engine, **notes},
    }


def _names(pid: int, process: str, threads: Sequence[str]) -> list[Event]:
    rows: list[tuple[int, str, Event]] = [(0, "process_name", {"name": process})]
    for tid, name in enumerate(threads):
        rows += [(tid, "thread_name", {"name": name}), (tid, "thread_sort_index", {"sort_index": tid})]
    return [{"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args} for tid, what, args in rows]


def _slice(pid: int, tid: int, name: str, begin_s: float, end_s: float, args: Event) -> Iterator[Event]:
    begin, end = round(begin_s * NS_PER_S), round(end_s * NS_PER_S)
    if end > begin:
        times = {"ts": microseconds(begin), "dur": microseconds(end - begin)}
        yield {"ph": "X", "cat": "serving", "name": name, "pid": pid, "tid": tid, **times, "args": args}
