"""Selects a part of a topology that can be drawn: a few nodes and their switches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.topologies.base import Topology
from moesim.hwmodels.units import format_quantity

MOST_PER_LAYER = 32
"""Most vertices of one kind that are drawn side by side."""


@dataclass(frozen=True, slots=True)
class PictureLayer:
    """All vertices of one kind, with their number and the names of those shown."""

    kind: str
    count: int
    shown: tuple[str, ...]

    @property
    def left_out(self) -> int:
        """Vertices that are not shown."""
        return self.count - len(self.shown)


@dataclass(frozen=True, slots=True)
class Cable:
    """One cable between two shown vertices; `rate` is the nominal rate of one direction, as text."""

    kind: str
    tail: str
    head: str
    rate: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Layers from top to bottom, cables, and the place of each vertex (0 to 1 across, layer number down)."""

    layers: tuple[PictureLayer, ...]
    cables: tuple[Cable, ...]
    places: dict[str, tuple[float, float]]
    scale_up_kinds: tuple[str, ...]


def picture(topology: Topology, nodes: int = 3) -> Picture:
    """A picture of the first nodes and the last one, with the switches that their cables reach."""
    wiring = topology.wiring
    names = wiring.names
    tails, heads = np.asarray(wiring.tails), np.asarray(wiring.heads)
    per_node = topology.gpus_per_node
    fits = max(1, MOST_PER_LAYER // per_node)
    wanted = sorted({*range(min(nodes, topology.nodes, fits) - 1), topology.nodes - 1})
    gpus = [node * per_node + gpu for node in wanted for gpu in range(per_node)][:MOST_PER_LAYER]
    shown = set(gpus)
    layers, below = [("gpu", topology.n_gpus, gpus)], set()
    for vertices in wiring.vertices[1:]:  # in the order of wiring: from the GPUs outwards
        ids = range(vertices.first, vertices.first + vertices.count)
        touching = {
            int(end)
            for one, other in ((tails, heads), (heads, tails))
            for end in one[np.isin(other, sorted(shown))].tolist()
        }
        drawn = [v for v in ids if v in touching][:MOST_PER_LAYER]
        layers.append((vertices.kind, vertices.count, drawn))
        shown |= set(drawn)
    cables: list[Cable] = []
    kinds: defaultdict[str, set[int]] = defaultdict(set)
    scale_up = {block.kind for block in wiring.cables if block.scale_up}
    index = 0
    for block in wiring.cables:
        for tail, head in zip(block.tails.tolist(), block.heads.tolist(), strict=True):
            if tail in shown and head in shown:
                link = topology.link(2 * index)
                rate = format_quantity(link.nominal_bytes_per_s, "bytes_per_s")
                cables.append(Cable(block.kind, names[tail], names[head], rate))
                kinds[block.kind] |= {tail, head}
            index += 1
    for kind, _, drawn in layers[1:]:
        if any(set(drawn) & ends for cable, ends in kinds.items() if cable in scale_up):
            below.add(kind)
    order = [layer for layer in layers[:0:-1] if layer[0] not in below]
    order += [layers[0], *(layer for layer in layers[1:] if layer[0] in below)]
    order = [layer for layer in order if layer[2]]
    places = {
        names[v]: ((n + 0.5) / len(drawn), float(len(order) - row))
        for row, (_, _, drawn) in enumerate(order)
        for n, v in enumerate(drawn)
    }
    return Picture(
        tuple(PictureLayer(kind, count, tuple(names[v] for v in drawn)) for kind, count, drawn in order),
        tuple(cables),
        places,
        tuple(sorted(scale_up)),
    )
