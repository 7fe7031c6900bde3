"""Finds the links that failures and degradations of a topology affect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.topologies.wiring import Wiring, gpu_name
from moesim.hwmodels.validation import nearest

FaultKind = Literal["nic", "link", "switch", "plane", "gpu-links"]


class LinkFault(Struct, frozen=True):
    """A component that keeps only the part `factor` of its bandwidth; 0 means that it is down.

    The form of `target` depends on the kind: nic "nic:17" (all NICs of GPU 17); link "leaf:0->spine:1#0"
    (a link's id; a cable fails in both directions); switch "leaf:3", or "nvswitch:0.2" for chip 2 of a
    striped switch; plane "plane:3" of a multi-plane network, or "scale-up:3" for chip 3 of every scale-up
    switch; gpu-links "gpu:5" (its scale-up ports).
    """

    kind: FaultKind
    target: str
    factor: float = 0.0


def link_factors(wiring: Wiring, faults: Sequence[LinkFault]) -> FloatArray:
    """[links] part of each link's bandwidth that faults leave; faults on the same link multiply.

    Raises InputError for a factor outside 0 to 1 and a target that does not exist.
    """
    left = np.ones(wiring.n_cables)
    for fault in faults:
        if not (isinstance(fault.factor, int | float) and 0.0 <= fault.factor <= 1.0):
            raise InputError(
                f"fault {fault.kind} {fault.target!r}: factor={fault.factor} is not the part of the "
                f"bandwidth that is left; write 0 (down) to 1 (healthy)"
            )
        if fault.kind not in get_args(FaultKind):
            known = list(get_args(FaultKind))
            raise InputError(
                f"fault kind {fault.kind!r} is not one of {', '.join(known)}{nearest(str(fault.kind), known)}"
            )
        try:
            cables, factor = _touched(wiring, fault)
        except InputError as error:
            raise InputError(f"fault {fault.kind} {fault.target!r}: {error}") from None
        left[cables] *= factor
    return np.repeat(left, 2)


def _touched(wiring: Wiring, fault: LinkFault) -> tuple[IntArray, float]:
    """The cables that a fault affects, and the factor on their bandwidth."""
    target, factor = fault.target, fault.factor
    match fault.kind:
        case "link":
            ends, _, copy = target.partition("#")
            tail, arrow, head = ends.partition("->")
            if not arrow:
                raise InputError("a link is written tail->head, such as gpu:0->leaf:0 or leaf:0->spine:1#0")
            a, b = wiring.vertex(tail), wiring.vertex(head)
            joins = ((wiring.tails == a) & (wiring.heads == b)) | ((wiring.tails == b) & (wiring.heads == a))
            if copy:
                joins &= wiring.copies == (int(copy) if copy.isdecimal() else -2)
            if not joins.any():
                raise InputError("there is no such link")
            return np.flatnonzero(joins), factor
        case "nic":
            return _gpu_cables(wiring, _number(target, "nic", wiring.n_gpus), scale_up=False), factor
        case "gpu-links":
            return _gpu_cables(wiring, _number(target, "gpu", wiring.n_gpus), scale_up=True), factor
        case "plane":
            return _plane(wiring, fault)
    name, dot, chip = target.rpartition(".")
    if dot and name in wiring.vertex_by_name:  # every port of a striped switch keeps the other chips' part
        vertex = wiring.vertex(name)
        chips = wiring.block_of(vertex).chips
        _number(f"chip:{chip}", "chip", chips)
        return _at(wiring, np.array([vertex])), (chips - 1 + factor) / chips
    vertex = wiring.vertex(target)
    if vertex < wiring.n_gpus:
        raise InputError("this is a GPU, not a switch; use gpu-links or nic")
    return _at(wiring, np.array([vertex])), factor


def _at(wiring: Wiring, vertices: IntArray) -> IntArray:
    return np.flatnonzero(np.isin(wiring.tails, vertices) | np.isin(wiring.heads, vertices))


def _gpu_cables(wiring: Wiring, gpu: int, *, scale_up: bool) -> IntArray:
    blocks = [
        block.first + np.flatnonzero((block.tails == gpu) | (block.heads == gpu))
        for block in wiring.cables
        if block.scale_up == scale_up
    ]
    cables = np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
    if not len(cables):
        raise InputError(f"{gpu_name(gpu)} has no {'scale-up ports' if scale_up else 'NIC'} in this topology")
    return cables


def _plane(wiring: Wiring, fault: LinkFault) -> tuple[IntArray, float]:
    if fault.target.startswith("scale-up:"):
        chips = {block.chips for block in wiring.vertices if block.chips > 1}
        if not chips:
            raise InputError("the scale-up switches of this topology are not striped over chips")
        n = min(chips)
        _number(fault.target, "scale-up", n)
        blocks = [block for block in wiring.cables if block.scale_up]
        cables = np.concatenate([block.first + np.arange(len(block.tails)) for block in blocks])
        return cables, (n - 1 + fault.factor) / n
    planes = np.full(wiring.n_vertices, -1)
    for block in wiring.vertices:
        if block.planes is not None:
            planes[block.first : block.first + block.count] = block.planes
    if planes.max() < 0:
        raise InputError("this topology has no planes")
    plane = _number(fault.target, "plane", int(planes.max()) + 1)
    return _at(wiring, np.flatnonzero(planes == plane)), fault.factor


def _number(target: str, word: str, count: int) -> int:
    name, _, number = target.partition(":")
    if name != word or not (number.isascii() and number.isdecimal() and int(number) < count):
        raise InputError(f"write {word}:N with N from 0 to {count - 1}")
    return int(number)


def check_connected(wiring: Wiring, left: FloatArray | None) -> None:
    """Raise InfeasibleError, naming the ranks, where live cables do not join all GPUs."""
    live = np.ones(wiring.n_cables, dtype=bool) if left is None else left[::2] > 0
    tails, heads = wiring.tails[live], wiring.heads[live]
    label = np.arange(wiring.n_vertices)
    while True:  # each vertex takes the smallest label of its neighbours, then the label of that
        new = label.copy()
        np.minimum.at(new, tails, label[heads])
        np.minimum.at(new, heads, label[tails])
        new = new[new]
        if np.array_equal(new, label):
            break
        label = new
    groups, sizes = np.unique(label[: wiring.n_gpus], return_counts=True)
    if len(groups) > 1:
        cut_off = np.flatnonzero(label[: wiring.n_gpus] != groups[np.argmax(sizes)])
        shown = ", ".join(gpu_name(int(gpu)) for gpu in cut_off[:4])
        more = f" and {len(cut_off) - 4} more" if len(cut_off) > 4 else ""
        raise InfeasibleError(
            f"rank {shown}{more} cannot be reached: no live link joins it to the other GPUs; "
            f"take it out of the job or repair a link on the way"
        )
