"""Computes launch stalls, the waits of compute for the host, by pass and spreads them over phases (pure).

The equations are L1 to L4 of docs/model.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from moesim.hwmodels.host import BlockFamily, CallKind, Host
from moesim.simulator.cost.table import Mode, PhaseCost
from moesim.simulator.model.calls import Calls
from moesim.simulator.model.operator import BlockKind, Phase


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Host seconds of the calls of one kind of block, all times multiplied by `slowness`.

    `compiled`: `torch.compile` compiled the block.
    """

    host: Host
    family: BlockFamily = "other"
    slowness: float = 1.0
    compiled: bool = False

    def call_s(self, kind: CallKind, forward: bool) -> float:
        """Host seconds of one call, forward or of its backward part."""
        return self.slowness * self.host.call_s(kind, forward, self.family, self.compiled)


@dataclass(frozen=True, slots=True)
class Launch:
    """Host seconds to launch a piece of work, and device seconds that it then takes."""

    host_s: float
    device_s: float
    reads: bool = False
    """Whether the host first reads a result of all work before it, which empties the queue again."""


@dataclass(frozen=True, slots=True)
class PassLaunches:
    """The launches of one block's forward or backward, in order.

    `drains`: the host reads a result from the device before the first launch, which empties the queue.
    """

    launches: tuple[Launch, ...]
    drains: bool = False


def host_seconds(calls: Iterable[Calls], host: HostTimes, extra_s: float = 0.0) -> float:
    """Eq. L1: host seconds of some calls; `extra_s` is added to each call that does forward work."""
    return fsum(c.times * (host.call_s(c.kind, c.forward) + extra_s * c.forward) for c in calls)


def launch_stall_s(one: PassLaunches) -> float:
    """Eq. L2 and L3: seconds in which the device is idle because the next launch has not arrived.

    Without a drained queue the host is ahead by whole blocks, and only the sums matter. After a drained queue
    the device restarts with the first launch, and no work can start before its own launch. A further read
    holds the host until the device is done.
    """
    device = fsum(launch.device_s for launch in one.launches)
    if not one.drains:
        return max(0.0, fsum(launch.host_s for launch in one.launches) - device)
    clock = done = 0.0
    for launch in one.launches:
        clock = (max(clock, done) if launch.reads else clock) + launch.host_s
        done = max(done, clock) + launch.device_s
    return done - device


def spread_launch_stalls(
    kind: BlockKind,
    compute: Mapping[tuple[BlockKind, Phase, Mode], PhaseCost],
    waits: tuple[float, float],
    modes: Sequence[Mode],
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block with its (forward, backward) launch stalls, spread in proportion to its phases."""
    out: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    for forward, wait in zip((True, False), waits, strict=True):
        if wait <= 0.0:
            continue
        for mode in modes:
            own = {
                key: cost
                for key, cost in compute.items()
                if key[0] == kind and key[2] == mode and key[1].endswith(" F") == forward
            }
            total = fsum(cost.fixed_s + cost.row_s for cost in own.values())
            for key, cost in own.items():
                part = wait * (cost.fixed_s + cost.row_s) / total if total else 0.0
                out[key] = replace(
                    cost, fixed_s=cost.fixed_s + part, host_s=part, worst_s=cost.worst_s + part
                )
    return out
