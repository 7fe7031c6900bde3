"""The cost table that the engine reads: prices of a step by block kind, phase and mode (plain data)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import Struct

from moesim.simulator.cost.evidence import NO_EVIDENCE, Evidence, Moved, combined
from moesim.simulator.cost.formulas import blended
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules.template import COMMUNICATION_PHASES

Mode = Literal["alone", "sms_reserved", "overlapped"]
"""How a phase runs: alone on all SMs, or in an overlapped pair while the communication SMs are idle
(`sms_reserved`) or busy (`overlapped`)."""
PAIR_MODES: tuple[Mode, Mode] = ("sms_reserved", "overlapped")
PHASES_OF: dict[str, tuple[Phase, ...]] = {
    "F": ("attn F", "dispatch F", "mlp F", "combine F"),
    "I": ("combine B", "mlp I", "dispatch B", "attn I"),
    "W": ("mlp W", "attn W"),
}
"""Phases of a block in its forward, its input gradients and its weight gradients."""
PhaseKey: TypeAlias = tuple[BlockKind, Phase, Mode]


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Seconds of the compute of one phase of one block on one GPU for one micro-batch.

    seconds = fixed_s + row_s * load, where load is received expert rows over the nominal number. `exposed_s`
    is the part of fixed_s in which the SMs wait for a collective inside the phase (tensor or context
    parallel), `host_s` the part in which they wait for a launch. `best_s` and `worst_s` bound the phase at
    load 1. Two prices with the same seconds are equal, even if their evidence differs.
    """

    fixed_s: float
    row_s: float = 0.0
    exposed_s: float = 0.0
    best_s: float = 0.0
    worst_s: float = 0.0
    host_s: float = 0.0
    evidence: Evidence = field(default=NO_EVIDENCE, compare=False, repr=False)
    """Evidence of the price, whose readings are compute at load 1 without waits for collectives or host."""
    moved: tuple[Moved, ...] = field(default=(), compare=False, repr=False)
    """Bytes of the collectives inside the phase, exposed or hidden."""

    @property
    def seconds(self) -> float:
        """Seconds at load 1."""
        return self.fixed_s + self.row_s


NO_COMPUTE = PhaseCost(0.0)
Compute: TypeAlias = Mapping[PhaseKey, PhaseCost]


def compute_of_pass(
    compute: Compute, kind: BlockKind, mode: Mode, forward: bool
) -> dict[PhaseKey, PhaseCost]:
    """The phases of a block's forward or backward in one mode."""
    return {
        key: cost
        for key, cost in compute.items()
        if key[0] == kind and key[2] == mode and key[1].endswith(" F") == forward
    }


def blend(sms_reserved: PhaseCost, overlapped: PhaseCost, share: float) -> PhaseCost:
    """Cost of a phase of which `share` runs beside busy communication SMs (docs/model.md, eq. E6)."""
    return PhaseCost(
        fixed_s=blended(sms_reserved.fixed_s, overlapped.fixed_s, share),
        row_s=blended(sms_reserved.row_s, overlapped.row_s, share),
        exposed_s=blended(sms_reserved.exposed_s, overlapped.exposed_s, share),
        best_s=min(sms_reserved.best_s, overlapped.best_s),
        worst_s=max(sms_reserved.worst_s, overlapped.worst_s),
        host_s=blended(sms_reserved.host_s, overlapped.host_s, share),
        evidence=combined(((sms_reserved.evidence, 1.0 - share), (overlapped.evidence, share))),
        moved=overlapped.moved or sms_reserved.moved,  # the same collectives in both modes
    )


@dataclass(frozen=True, slots=True)
class TransferCost:
    """A collective of the communication stream, which is a barrier followed by a payload.

    A member's payload alone on its links takes max(nic_s * node load, scale_up_s * load). `launch_s` is the
    notify and launch part after the last member arrived. Small kernels before the barrier are a `PhaseCost`
    under the same key.
    """

    launch_s: float
    nic_s: float
    scale_up_s: float
    nic_bytes: float
    scale_up_bytes: float
    best_s: float = 0.0
    worst_s: float = 0.0
    """Bounds of the payload: `best_s` at nominal link rates, `worst_s` with all residuals and slow-downs."""
    evidence: Evidence = field(default=NO_EVIDENCE, compare=False, repr=False)
    moved_before: tuple[Moved, ...] = field(default=(), compare=False, repr=False)
    """Bytes that cross the links before the payload, inside `launch_s`."""

    @property
    def payload_s(self) -> float:
        """Payload under even load: the slower of the two paths, which run at the same time chunk by chunk."""
        return max(self.nic_s, self.scale_up_s)


Transfers: TypeAlias = Mapping[PhaseKey, TransferCost]


@dataclass(frozen=True, slots=True)
class SyncCost:
    """End of the step on one pipeline rank: gradient reduction, global norm, optimizer, gather."""

    reduce_s: float
    norm_s: float
    optimizer_s: float
    gather_s: float
    best_s: float = 0.0
    worst_s: float = 0.0
    evidence: Evidence = field(default=NO_EVIDENCE, compare=False, repr=False)
    moved: tuple[Moved, ...] = field(default=(), compare=False, repr=False)
    """Bytes of all collectives outside of the actions, exposed or hidden, for the whole step."""

    @property
    def total_s(self) -> float:
        """Seconds of the four parts, which run one after the other."""
        return self.reduce_s + self.norm_s + self.optimizer_s + self.gather_s


class SlowSends(Struct, frozen=True):
    """Pipeline sends that cross borders of a network, by (source, target) rank.

    `alone`: time over that inside a domain, alone on the border; `by_latency`: by its latency only.
    `bytes_per_s`: of each border for one of the most GPUs that send over it at once; `crossing`: (border, its
    senders over that number) of each pair.
    """

    alone: Mapping[tuple[int, int], float]
    by_latency: Mapping[tuple[int, int], float]
    bytes_per_s: tuple[float, ...]
    crossing: Mapping[tuple[int, int], tuple[tuple[int, float], ...]]


NO_SLOW_SENDS = SlowSends({}, {}, (), {})


@dataclass(frozen=True, slots=True)
class CostTable:
    """Prices by block kind, phase and mode; transfers have no mode `sms_reserved`."""

    compute: Compute
    transfer: Transfers
    send_bytes: float
    send_s: float
    """Seconds of one pipeline hop of one micro-batch, alone on its links; 0 without a pipeline."""
    sync: tuple[SyncCost, ...]
    """One entry a pipeline rank."""
    send_across_nodes: bool = True
    """Whether a pipeline hop uses the NICs; inside a node it uses the scale-up ports."""
    scatters_wait: bool = False
    """Whether compute outside of overlapped pairs waits for the gradient scatters of its blocks."""
    gathers_wait: bool = False
    """Whether parameter gathers wait for the compute before them, too."""
    _blends: dict[tuple[BlockKind, Phase, float], PhaseCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cached prices of phases in pairs."""

    @property
    def evidence(self) -> Evidence:
        """Evidence of all prices of the table, each price taken once."""
        parts = [price.evidence for price in self.compute.values()]
        parts += [price.evidence for price in self.transfer.values()]
        parts += [price.evidence for price in self.sync]
        return combined((part, 1.0) for part in parts)

    def phase(self, kind: BlockKind, phase: Phase, overlapped_share: float | None) -> PhaseCost:
        """Compute of a phase, alone (None) or with a share of it beside busy communication SMs."""
        if overlapped_share is None:
            return self.compute.get((kind, phase, "alone"), NO_COMPUTE)
        key = (kind, phase, overlapped_share)
        price = self._blends.get(key)
        if price is None:
            if (kind, phase, "alone") not in self.compute:
                return NO_COMPUTE
            sms_reserved, overlapped = (self.compute[kind, phase, mode] for mode in PAIR_MODES)
            price = self._blends[key] = blend(sms_reserved, overlapped, overlapped_share)
        return price

    def phase_s(self, kind: BlockKind, phase: Phase, overlapped_share: float | None) -> tuple[float, float]:
        """(`fixed_s`, `row_s`) of `phase`, without the rest of its price."""
        if overlapped_share is None or (kind, phase, "alone") not in self.compute:
            price = self.compute.get((kind, phase, "alone"), NO_COMPUTE)
            return price.fixed_s, price.row_s
        first, second = (self.compute[kind, phase, mode] for mode in PAIR_MODES)
        return (
            blended(first.fixed_s, second.fixed_s, overlapped_share),
            blended(first.row_s, second.row_s, overlapped_share),
        )

    def phases(self, kind: BlockKind) -> frozenset[Phase]:
        """Phases that a block of this kind has."""
        computed = {phase for k, phase, _ in self.compute if k == kind and phase not in COMMUNICATION_PHASES}
        return frozenset(computed | {phase for k, phase, _ in self.transfer if k == kind})
