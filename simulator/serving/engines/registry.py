"""What a release of an inference engine does; `vllm-0.19` is the module `vllm_0_19.py`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest

ENGINES = ("vllm-0.19", "sglang-0.5", "trtllm-1.2")
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

    `mixed`, `chunked`: as `scheduler.Policy`. `graph_buckets`: batch sizes of captured decode graphs, in order.
    `block_tokens`: tokens of a cache block. `step_host_s`: host time of a step that the GPU waits for.
    `launch_s`: host time of a kernel in steps without a graph.
    """

    name: str
    mixed: bool
    chunked: bool
    block_tokens: int
    graph_buckets: tuple[int, ...]
    step_host_s: Sourced
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
