"""Formulas of a step that the simulator and the planner share, for numbers and elementwise for arrays (pure).

The engine applies them to the members of a group, the planner's closed form to many plans at once, so that
neither can drift from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray

Amount: TypeAlias = float | FloatArray
A = TypeVar("A", float, FloatArray)
Time = TypeVar("Time", int, FloatArray)
"""Whole nanoseconds of one plan, or seconds of many plans."""


def blended(sms_reserved: A, overlapped: A, share: float | A) -> A:
    """A figure of a phase of which `share` runs beside busy communication SMs (docs/model.md, eq. E6)."""
    return sms_reserved + share * (overlapped - sms_reserved)


def busy_share(transfer_s: Amount, overlapped_s: Amount) -> FloatArray:
    """Share of the compute of a layer pair that runs beside its transfers (docs/model.md, eq. E20).

    `transfer_s`: payloads of the pair's transfers; `overlapped_s`: its compute if all of it ran beside busy
    communication SMs. While the transfers run, compute proceeds at that pace.
    """
    least = np.maximum(overlapped_s, 1e-30)
    return np.asarray(np.minimum(1.0, transfer_s / least))


def compute_seconds(fixed_s: Amount, row_s: Amount, load: Amount) -> Amount:
    """Seconds of a phase's compute; `load`: received expert rows over the nominal number (eq. E1)."""
    return fixed_s + row_s * load


def payload_seconds(
    nic: tuple[Amount, Amount], scale_up: tuple[Amount, Amount], slowness: tuple[Amount, Amount] = (1.0, 1.0)
) -> FloatArray:
    """Seconds of a member's payload in a transfer, alone on its links (eq. E2).

    `nic` and `scale_up`: (seconds under even load, received rows over the nominal number); rows through the
    NICs are averaged over a node. `slowness`: time of both over that in a healthy cluster.
    """
    return np.asarray(
        np.maximum(_slowed(nic[0] * nic[1], slowness[0]), _slowed(scale_up[0] * scale_up[1], slowness[1]))
    )


def _slowed(seconds: Amount, slowness: Amount) -> Amount:
    return seconds if isinstance(slowness, float) and slowness == 1.0 else seconds * slowness


class SyncParts(Struct, Generic[Time], frozen=True):
    """Durations of the parts of the end of the step on one pipeline rank."""

    reduce: Time
    norm: Time
    optimizer: Time
    gather: Time


class SyncTimes(Struct, Generic[Time], frozen=True):
    """Times at which parts of the end of the step end on a pipeline rank; `ready` starts the reduction."""

    ready: Time
    reduced: Time
    meet: Time
    """When the slowest rank has reduced its gradients and the norm, a barrier, can start."""
    norm: Time
    updated: Time
    gathered: Time


def end_of_step(
    done: Sequence[Time],
    holders: Sequence[Sequence[int]],
    parts: Sequence[SyncParts[Time]],
    latest: Callable[[Sequence[Time]], Time],
) -> list[SyncTimes[Time]]:
    """Gradient reduction, global norm, optimizer and parameter gather after the last action (eq. E5).

    `done[r]`: end of the last action of pipeline rank r. `holders[r]`: the ranks that hold the same stages; a
    reduction waits for all of them. Gradient clipping makes the norm a barrier of all ranks.
    """
    ready = [latest([done[holder] for holder in own]) for own in holders]
    reduced = [start + part.reduce for start, part in zip(ready, parts, strict=True)]
    meet = latest(reduced)
    times = []
    for start, end, part in zip(ready, reduced, parts, strict=True):
        norm = meet + part.norm
        updated = norm + part.optimizer
        times.append(SyncTimes(start, end, meet, norm, updated, updated + part.gather))
    return times
