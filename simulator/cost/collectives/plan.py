"""The plan of a collective: flows between GPUs that overlap chunk by chunk, and their latency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError

Operation = str
"""Name of an operation such as all_reduce; `registry.operations` lists those that some algorithm can run."""
Protocol = Literal["LL", "LL128", "Simple"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")


@dataclass(frozen=True, slots=True)
class Flows:
    """Payload `bytes[i]` from global GPU `src[i]` to `dst[i]`; each pair occurs once, in ascending order."""

    src: IntArray
    dst: IntArray
    bytes: FloatArray


@dataclass(frozen=True, slots=True)
class Hops:
    """Dependent steps on the longest path through a phase, by the kind of link that they cross."""

    scale_up: int
    network: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Flows that overlap chunk by chunk; the phase lasts as long as its busiest link."""

    flows: Flows
    hops: Hops
    own_bytes: float = 0.0
    """Bytes that the kernel copies inside each GPU without hiding them behind the links."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The phases of a collective, which run one after the other."""

    operation: Operation
    algorithm: str
    phases: tuple[Phase, ...]


def flows_of(pairs: Iterable[tuple[int, int, float]]) -> Flows:
    """Flows of (source, destination, bytes) triples; equal pairs add up, sends to itself are dropped."""
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
    """The ranks of a group by node, both in ascending order.

    Raises InputError for fewer than two ranks and for a repeated rank.
    """
    if len(ranks) < 2 or len(set(ranks)) != len(ranks):
        raise InputError(f"a collective needs at least 2 different ranks; these are {list(ranks)}")
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // gpus_per_node, []).append(rank)
    return tuple(tuple(nodes[node]) for node in sorted(nodes))


def size_of(group: Group) -> int:
    """Number of ranks of a group."""
    return sum(len(node) for node in group)


def rails_of(group: Group) -> int:
    """Number of rings, chains or NICs that every node can use at once, set by the smallest node."""
    return min(len(node) for node in group)
