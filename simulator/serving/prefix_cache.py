"""The prefix cache: blocks of prompts that requests share; the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """The blocks of one rank: shared ones by id, in use or idle, and those that belong to one sequence.

    `capacity`: blocks in all, None for no limit. `weight`: blocks that one shared id stands for. An id stands
    for its tokens and everything before them, as in the hash chains of vLLM and Mooncake, so a request's hits
    are its first ids only.
    """

    def __init__(self, capacity: int | None = None, weight: int = 1) -> None:
        """An empty cache."""
        self.capacity, self.weight = capacity, weight
        self.hits = self.asked = self.evicted = self.peak = 0
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._own = 0

    @property
    def free(self) -> int | None:
        """Blocks that can be taken: empty ones and idle ones; None without a limit."""
        return None if self.capacity is None else self.capacity - len(self._users) * self.weight - self._own

    def fits(self, blocks: int) -> bool:
        """Whether so many blocks can be taken."""
        return self.free is None or blocks <= self.free

    def matched(self, ids: list[int]) -> int:
        """Ids at the start of a prompt that are here."""
        for place, one in enumerate(ids):
            if one not in self._users and one not in self._idle:
                return place
        return len(ids)

    def take(self, ids: list[int], own: int) -> bool:
        """Hold a prompt's shared blocks and `own` more; False, and nothing held, where they do not fit."""
        used = sum(one in self._users for one in ids)
        if not self.fits((len(ids) - used) * self.weight + own):
            return False
        self.asked += len(ids)
        self.hits += self.matched(ids)
        for one in ids:
            self._idle.pop(one, None)
            self._users[one] = self._users.get(one, 0) + 1
        self.grow(own)
        return True

    def release(self, ids: list[int], own: int) -> None:
        """Let go of a sequence's blocks, its last first, as the start of a prompt is shared most."""
        self._own -= own
        for one in reversed(ids):
            left = self._users[one] - 1
            if left:
                self._users[one] = left
            else:
                del self._users[one]
                self._idle[one] = None

    def grow(self, blocks: int) -> None:
        """Take blocks of one sequence's own; idle ones that were used longest ago make room."""
        self._own += blocks
        used = len(self._users) * self.weight + self._own
        self.peak = max(self.peak, used)
        if self.capacity is None:
            return
        room = self.capacity - used
        while self._idle and len(self._idle) * self.weight > room:
            self._idle.popitem(last=False)
            self.evicted += 1
