"""What a release of an inference engine does: `data/serving/engines.yaml`, each answer with its source."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveInt

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import parse_mapping


class EngineFigure(Section):
    """A figure of an engine, who says so, and its range where nobody measured it."""

    value: float
    source: str
    low: float
    high: float


def _expanded(buckets: Any) -> Any:
    """Batch sizes from a list whose entries may be [first, last, step]."""
    sizes: list[Any] = []
    for entry in buckets:
        sizes += range(entry[0], entry[1] + 1, entry[2]) if isinstance(entry, list) else [entry]
    return tuple(sizes)


class ServingEngine(Section):
    """Answers of one release."""

    mixed: bool
    """Whether a step has prompts beside decodes, else prompts go first and alone."""
    chunked: bool
    """Whether a prompt may be cut."""
    token_for_each: bool = False
    """Whether the release refuses fewer tokens a step than sequences (vLLM); others let sequences wait."""
    reserve: tuple[float, float] = (0.0, 0.0)
    """Shares of tokens yet to be written, by a new request and by others, that admission leaves room for."""
    block_tokens: PositiveInt
    """Tokens of a cache block."""
    memory: Literal["all", "static", "free"]
    """What its share of memory counts: weights, buffers, cache; no buffers; or what is left for the cache."""
    exchange: Literal["allgather", "deepep"]
    """How tokens reach experts by default where attention is data-parallel."""
    fused_norms: bool
    """Whether sums over TP in one node also norm, on Hopper and Blackwell and without data parallelism."""
    shared_beside: int
    """Most rows for which shared experts run on a stream beside router and routed experts in a graph."""
    graph_buckets: Annotated[tuple[PositiveInt, ...], BeforeValidator(_expanded)]
    """Batch sizes of captured decode graphs, in order."""
    graph_prefill: int
    """Most tokens of a step with prompts whose pieces between attentions are captured too; 0 for none."""
    host_overlapped: bool
    """Whether the host works on the next step while the GPU runs this one."""
    drafts_overlapped: bool = True
    """Whether it also does with drafts."""
    host_s: EngineFigure
    """Host time of a step: schedule, inputs, sampling, detokenisation."""
    exposed_host_s: EngineFigure
    """What the GPU waits for the host between steps although it works ahead."""
    launch_s: EngineFigure
    """Host time of a kernel in steps without a graph."""
    request_s: EngineFigure
    """What HTTP server and transport to the engine take of a request, one after another as its tokeniser."""
    source: str


@lru_cache(maxsize=1)
def engines() -> dict[str, ServingEngine]:
    """All engines by release."""
    place = "data/serving/engines.yaml"
    text = (resources.files("moesim.simulator") / place).read_text("utf-8")
    return {
        name: validate_model(ServingEngine, row, f"{place}: {name}")
        for name, row in parse_mapping(text, place).items()
    }


def engine(name: str) -> ServingEngine:
    """The engine of that name; raises InputError with the nearest for an unknown one."""
    known = engines()
    if name not in known:
        raise InputError(
            f"serving.engine={name!r} is not known{nearest(name, list(known))}; known: {', '.join(known)}"
        )
    return known[name]
