"""Keeps the most recently used results of jobs as bytes, so that their memory is known and bounded."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from typing import Any


class Cache:
    """A cache of the most recently used values, bounded by `limit_bytes` of pickled bytes.

    Values that somebody holds stay, as long as they take at most half of the limit; then the one that was
    held first loses its place.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Start empty."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._holders: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Any:
        """The value, or None where there is none."""
        with self._lock:
            data = self._values.get(key)
            if data is not None:
                self._values.move_to_end(key)
        return None if data is None else pickle.loads(data)

    def __contains__(self, key: str) -> bool:
        """Whether the cache has a value for the key."""
        with self._lock:
            return key in self._values

    def put(self, key: str, data: bytes) -> None:
        """Store pickled bytes and drop the least recently used; a value above the limit is not stored."""
        with self._lock:
            self.used_bytes -= len(self._values.pop(key, b""))
            if len(data) > self.limit_bytes:
                return
            self._values[key] = data
            self.used_bytes += len(data)
            while self.used_bytes > self.limit_bytes:
                oldest = next((name for name in self._values if name not in self._holders), None)
                if oldest is None:
                    oldest = next(iter(self._values))
                self.used_bytes -= len(self._values.pop(oldest))

    def drop(self, key: str) -> None:
        """Forget a value."""
        with self._lock:
            self.used_bytes -= len(self._values.pop(key, b""))
            self._holders.pop(key, None)

    def hold(self, key: str) -> None:
        """Keep a value until it is released as often as it was held; nothing where it is not there."""
        with self._lock:
            if key not in self._values:
                return
            self._holders[key] = self._holders.get(key, 0) + 1
            while sum(len(self._values.get(name, b"")) for name in self._holders) > self.limit_bytes // 2:
                self._holders.popitem(last=False)

    def release(self, key: str) -> None:
        """Give up one hold on a value; nothing where nobody holds it."""
        with self._lock:
            left = self._holders.get(key, 0) - 1
            if left > 0:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)
