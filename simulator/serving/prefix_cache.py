"""The prefix cache: blocks of prompts that requests share; the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """The blocks of one rank: shared ones by id, in use or idle, and those that belong to sequences alone.

    `capacity`: blocks in all, None for no limit. `weight`: blocks that one shared id stands for. An id stands
    for its tokens and everything before them, as in the hash chains of vLLM and Mooncake, so a request's hits
    are its first ids only. `peak`: most blocks in use.
    """

    def __init__(self, capacity: int | None = None, weight: int = 1) -> None:
        """An empty cache."""
        self.capacity, self.weight = capacity, weight
        self.hits = self.asked = self.evicted = self.peak = 0
        self.shared = 0  # blocks of ids in use
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def fits(self, own: int, ids: list[int] | None = None) -> bool:
        """Whether `own` blocks of sequences alone fit, beside the shared ones in use and those of `ids`."""
        if self.capacity is None:
            return True
        new = sum(one not in self._users for one in ids) * self.weight if ids else 0
        return own + self.shared + new <= self.capacity

    def matched(self, ids: list[int]) -> int:
        """Ids at the start of a prompt that are here."""
        for place, one in enumerate(ids):
            if one not in self._users and one not in self._idle:
                return place
        return len(ids)

    def take(self, ids: list[int], own: int) -> None:
        """Hold a prompt's shared blocks, beside `own` of sequences alone."""
        self.asked += len(ids)
        self.hits += self.matched(ids)
        for one in ids:
            self._idle.pop(one, None)
            self._users[one] = self._users.get(one, 0) + 1
        self.shared = len(self._users) * self.weight
        self.hold(own)

    def release(self, ids: list[int]) -> None:
        """Let go of a prompt's blocks, its last first, as the start of a prompt is shared most."""
        for one in reversed(ids):
            left = self._users[one] - 1
            if left:
                self._users[one] = left
            else:
                del self._users[one]
                self._idle[one] = None
        self.shared = len(self._users) * self.weight

    def hold(self, own: int) -> None:
        """Sequences alone have `own` blocks; idle shared ones that were used longest ago make room."""
        used = self.shared + own
        self.peak = max(self.peak, used)
        if self.capacity is None:
            return
        while self._idle and len(self._idle) * self.weight > self.capacity - used:
            self._idle.popitem(last=False)
            self.evicted += 1
