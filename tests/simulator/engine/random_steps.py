"""Small random steps, and the comparison of two executions in every record.

Durations, bytes and bandwidths come from small sets, so that many events of a step fall on one nanosecond and
many flows meet on full links: order of ties and sums of rates are what two engines could do differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.table import SyncCost, TransferCost
from moesim.simulator.engine.link_map import Demand, FoldedLinkMap
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.records import Barriers, BarrierWaits, Execution, barriers, waits
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import SCHEDULES, build

if TYPE_CHECKING:
    from moesim.simulator.schedules import Schedule

Toy = Callable[..., Program]

COMPUTE_NS = ((10,), (0, 10, 20), (1, 2, 3, 5), (0, 1, 50, 100), (7, 13, 101, 997))
TRANSFER_NS = (0.5, 1.0, 5.0, 10.0, 10.0, 20.0, 37.5, 100.0)
BYTES = (1.0, 8.0, 10.0, 10.0, 64.0, 1000.0)
CAPACITY = (0.1, 0.5, 1.0, 1.0, 2.0, 8.0, 1e6)
KINDS: tuple[BlockKind, ...] = ("dense", "moe", "moe", "moe")
LINKS = (6, 12, 40, 256, 257, 600)
"""Numbers of links on both sides of the border between the two forms of link sharing (256)."""


class RandomLinkMap(FoldedLinkMap):
    """Random links, bytes and slow members; several groups with the same `seed` have the same bandwidths."""

    def __init__(self, pp: int, links: int, members: int, seed: int, group: int, cut: bool) -> None:
        """`cut`: bytes follow the loads, as where capacity drops rows."""
        super().__init__(pp, 1e9, 1e9, sends_cross_nodes=True)
        self._capacity = np.random.default_rng([seed, 1]).choice(CAPACITY, links)
        self.members, self.seed, self.group, self.cut = members, seed, group, cut
        self.busy = min(links, 8)
        self._demands: dict[tuple[int, ...], Demand] = {}

    @cached_property
    def slow_pairs(self) -> bool:
        """Whether the members of a send differ in speed."""
        return bool(np.random.default_rng([self.seed, 2]).random() < 0.3)

    def _demand(self, *key: int) -> Demand:
        if key not in self._demands:
            random = np.random.default_rng([self.seed, self.group, *key])
            links = random.choice(self.busy, random.integers(1, min(6, self.busy) + 1), replace=False)
            spread = len(self._capacity) // self.busy  # over all link numbers
            self._demands[key] = Demand(links * spread, random.choice(BYTES, len(links)))
        return self._demands[key]

    def uniform(self, rank: int, phase: Phase, cost: TransferCost) -> Demand | None:  # type: ignore[override]
        """None where bytes follow the loads."""
        return None if self.cut else self._demand(3, rank, len(phase))

    def transfer(
        self, rank: int, phase: Phase, cost: TransferCost, load: FloatArray, node_load: FloatArray
    ) -> Demand:
        """As the even load, times the mean load."""
        even = self._demand(3, rank, len(phase))
        return Demand(even.links, even.bytes * float(load.mean()))

    def send(self, source: int, target: int, size: float) -> Demand:
        """A demand for every pair of ranks."""
        return self._demand(4, source, target)

    def send_slowness(self, source: int, target: int) -> FloatArray | float:
        """The slowness of every member of some sends."""
        if not self.slow_pairs:
            return 1.0
        return np.random.default_rng([self.seed, 5, source, target]).choice([1.0, 1.5, 2.0], self.members)


def random_step(toy: Toy, seed: int) -> list[Program]:
    """The programs of all groups of a random step; `toy` is `build_toy` of tests/conftest.py."""
    random = np.random.default_rng([seed, 0])
    schedule = random_schedule(random)
    members, groups = int(random.integers(1, 5)), int(random.choice([1, 1, 1, 2, 3]))
    links, layers = int(random.choice(LINKS)), int(random.integers(1, 4))
    kinds = [[KINDS[n] for n in random.integers(0, len(KINDS), layers)] for _ in range(schedule.n_stages)]
    if random.random() < 0.5:  # a folded program: all stages alike, which makes ranks act at once
        kinds = [kinds[0]] * schedule.n_stages
    routed = sum(kind == "moe" for stage in kinds for kind in stage)
    pool, even = COMPUTE_NS[random.integers(0, len(COMPUTE_NS))], random.random() < 0.5
    table = random.choice(pool, 64)
    transfers = random.choice(TRANSFER_NS, 64)
    sync = [SyncCost(3e-9, 1e-9, 2e-9, 5e-9)] * schedule.pp
    more = {
        "launch_ns": int(random.choice([0, 0, 1, 10])),
        "send_ns": float(random.choice([0.0, 0.4, 1.0, 10.0, 33.3])),
        "bytes_": float(random.choice([0.0, *BYTES])),
        "rate": float(random.choice([1e8, 1e9, 2e9, 1e30])),
        "sharding_ns": float(random.choice([0.0, 10.0, 37.5])),
        "scatters_wait": bool(random.random() < 0.3),
        "jitter_cv": float(random.choice([0.0, 0.0, 0.05])),
        "clock": random.choice([1.0] if even else [0.8, 1.0, 1.1], (schedule.pp, members)).tolist(),
        "loads": {n: random.choice([0.0, 0.5, 1.0, 1.5], members).tolist() for n in range(routed)}
        if random.random() < 0.4
        else None,
        "sync": sync,
    }
    cut, folded = more["loads"] is not None, groups == 1 and random.random() < 0.4
    return [
        toy(
            schedule,
            kinds,
            lambda kind, phase, beside: float(table[(len(kind) + 3 * len(phase) + beside) % 64]),
            lambda phase, beside: float(transfers[(5 * len(phase) + beside) % 64]),
            link_map=None if folded else RandomLinkMap(schedule.pp, links, members, seed, group, cut),
            group=group,
            **more,
        )
        for group in range(groups)
    ]


def random_schedule(random: np.random.Generator) -> Schedule:
    """A schedule of the registry over few ranks; sizes that it refuses are drawn again."""
    from moesim.hwmodels.errors import InputError

    while True:
        name = str(random.choice(sorted(SCHEDULES)))
        pp = int(random.choice([1, 2, 3, 4]))
        try:
            return build(name, pp, int(random.choice([1, 2, 3, 4, 6, 8, 12])))
        except (InputError, ValueError):
            continue


def differences(ours: Sequence[Execution], reference: Sequence[Execution]) -> list[str]:
    """What differs between two runs of a step, in words; nothing where every record is equal."""
    result = [] if len(ours) == len(reference) else [f"{len(ours)} groups for {len(reference)}"]
    for group, (one, other) in enumerate(zip(ours, reference, strict=False)):
        for name in ("start", "end", "free", "ends", "begins", "finishes"):
            a, b = getattr(one.times, name), getattr(other.times, name)
            if a.shape != b.shape or not np.array_equal(a, b):
                result.append(f"group {group}: {name}")
        names = (*Barriers._fields, *BarrierWaits._fields)
        pairs = zip((*barriers(one), *waits(one)), (*barriers(other), *waits(other)), strict=True)
        for name, (a, b) in zip(names, pairs, strict=True):
            if not np.array_equal(a, b):
                result.append(f"group {group}: {name} of the barriers")
        if list(one.sends) != list(other.sends):
            result.append(f"group {group}: sends")
        if one.syncs != other.syncs or one.end_ns != other.end_ns:
            result.append(f"group {group}: end of the step")
        if one.carried_bytes.tobytes() != other.carried_bytes.tobytes():
            result.append(f"group {group}: bytes on the links")
    return result
