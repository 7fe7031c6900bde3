"""What a collective is: flows between GPUs that run chunk by chunk at the same time, and their latency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError

Operation = str
"""all_reduce, all_gather, ...: `registry.operations` lists what some algorithm can do."""
Protocol = Literal["LL", "LL128", "Simple"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")


@dataclass(frozen=True, slots=True)
class Flows:
    """Payload `bytes[i]` from global GPU `src[i]` to `dst[i]`; each pair once, in order of the pairs."""

    src: IntArray
    dst: IntArray
    bytes: FloatArray


@dataclass(frozen=True, slots=True)
class Hops:
    """Dependent steps on the longest way through a phase, by what they cross."""

    scale_up: int
    network: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Flows that overlap chunk by chunk; the phase lasts as long as its busiest link."""

    flows: Flows
    hops: Hops
    own_bytes: float = 0.0
    """Copied by the kernel inside each GPU and not hidden behind the links."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Phases one after the other."""

    operation: Operation
    algorithm: str
    phases: tuple[Phase, ...]


def flows_of(pairs: Iterable[tuple[int, int, float]]) -> Flows:
    """Flows of (source, destination, bytes) triples: equal pairs added up, a GPU to itself left out."""
    total: dict[tuple[int, int], float] = {}
    for src, dst, size in pairs:
        if src != dst and size > 0.0:
            total[src, dst] = total.get((src, dst), 0.0) + size
    keys = sorted(total)
    return Flows(
        np.array([k[0] for k in keys], dtype=np.int64),
        np.array([k[1] for k in keys], dtype=np.int64),
        np.array([total[k] for k in keys], dtype=np.float64),
    )


Group = tuple[tuple[int, ...], ...]
"""Global GPU numbers of the ranks, node by node."""


def group_by_node(ranks: Sequence[int], gpus_per_node: int) -> Group:
    """The ranks of a group by the node they sit on, both in ascending order.

    Raises InputError for fewer than two ranks and for one that stands twice.
    """
    if len(ranks) < 2 or len(set(ranks)) != len(ranks):
        raise InputError(f"a collective needs at least 2 different ranks; these are {list(ranks)}")
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // gpus_per_node, []).append(rank)
    return tuple(tuple(nodes[node]) for node in sorted(nodes))


def size_of(group: Group) -> int:
    """Number of ranks."""
    return sum(len(node) for node in group)


def rails_of(group: Group) -> int:
    """Rings, chains and NICs that a node can use at once: the members of its smallest node."""
    return min(len(node) for node in group)
