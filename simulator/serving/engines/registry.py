"""What a release of an inference engine does; `vllm-0.19` is the module `vllm_0_19.py`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Literal, NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest

ENGINES = ("vllm-0.19", "sglang-0.5", "trtllm-1.2", "deepseek-online")
"""Releases that are known."""


class Sourced(NamedTuple):
    """A figure of an engine, who says so, and its range where nobody measured it."""

    value: float
    source: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """Answers of one release.

    `mixed`, `chunked`: as `scheduler.Policy`. `block_tokens`: tokens of a cache block. `memory`: what its share
    of memory counts: weights, buffers and cache (`all`), without buffers (`static`), or what is left for the
    cache (`free`). `exchange`: how tokens reach experts by default where attention is data-parallel.
    `graph_buckets`: batch sizes of captured decode graphs, in order. `graph_prefill`: most tokens of a step with
    prompts whose pieces between attentions are captured too, 0 if none. `host_s`: host time of a step (schedule,
    inputs, sampling, detokenise), which the GPU waits for unless `host_overlapped`; then `exposed_host_s` is
    left. `launch_s`: host time of a kernel in steps without a graph.
    """

    name: str
    mixed: bool
    chunked: bool
    block_tokens: int
    memory: Literal["all", "static", "free"]
    exchange: Literal["allgather", "deepep"]
    graph_buckets: tuple[int, ...]
    graph_prefill: int
    host_overlapped: bool
    host_s: Sourced
    exposed_host_s: Sourced
    launch_s: Sourced
    source: str


def engine(name: str) -> Engine:
    """The engine of that name; raises InputError with the nearest for an unknown one."""
    if name not in ENGINES:
        raise InputError(
            f"serving.engine={name!r} is not known{nearest(name, list(ENGINES))}; known: {', '.join(ENGINES)}"
        )
    module = import_module(f"moesim.simulator.serving.engines.{name.replace('-', '_').replace('.', '_')}")
    found: Engine = module.ENGINE
    return found
