"""Bounded caches of values that several scenarios share; a cache changes the speed of a prediction only.

Every cached value is a pure function of its key, and nothing changes it afterwards: arrays are read-only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from hashlib import blake2b
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np
from pydantic import BaseModel

Value = TypeVar("Value")
Array = TypeVar("Array", bound=np.ndarray[Any, Any])

ENTRY_BYTES = 1000
"""About what a small object takes in a cache with its key and its fields; few of them are mere numbers."""

_CACHES: WeakSet[BoundedCache[Any]] = WeakSet()


class BoundedCache(Generic[Value]):
    """Keeps the values used last, up to a total weight such as bytes; a heavier value is not kept."""

    def __init__(self, most: int, weigh: Callable[[Value], int] = lambda value: 1) -> None:
        """`most`: largest total weight; `weigh` gives the weight of a value, by default 1."""
        self._most, self._weigh = most, weigh
        self._weight = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()
        _CACHES.add(self)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made by `make` where it is not kept."""
        kept = self._values.get(key)
        if kept is not None:
            try:  # noqa: SIM105 - a context manager takes longer than the look-up
                self._values.move_to_end(key)
            except KeyError:  # another thread has just dropped it
                pass
            return kept[0]
        return self.put(key, make())

    def find(self, key: Hashable) -> Value | None:
        """The value of a key, None where it is not kept."""
        kept = self._values.get(key)
        return None if kept is None else self.get(key, lambda: kept[0])

    def put(self, key: Hashable, value: Value) -> Value:
        """Keep a value, or return the equal one that is kept already."""
        weight = self._weigh(value)
        with self._lock:
            kept = self._values.get(key)
            if kept is not None:
                return kept[0]
            if weight > self._most:
                return value
            self._values[key] = value, weight
            self._weight += weight
            while self._weight > self._most:
                self._weight -= self._values.popitem(last=False)[1][1]
        return value

    def replace(self, key: Hashable, value: Value) -> Value:
        """Keep another value for a key."""
        with self._lock:
            kept = self._values.pop(key, None)
            self._weight -= 0 if kept is None else kept[1]
        self.put(key, value)
        return value

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._values.clear()
            self._weight = 0

    @property
    def weight(self) -> int:
        """Total weight of the values that are kept."""
        return self._weight


def clear_caches() -> None:
    """Empty every `BoundedCache`, as in a fresh process."""
    for cache in list(_CACHES):
        cache.clear()


class Same:
    """A key that equals itself and keys of the same object, which it keeps alive; for unchanging objects."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        """`value`: an object that nothing changes."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Whether both are keys of one object."""
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        """Hash of the object's identity."""
        return id(self.value)


class Equal:
    """A key that equals keys of equal models; their texts tell most others apart at once."""

    __slots__ = ("_hash", "model")

    def __init__(self, model: BaseModel) -> None:
        """`model`: a frozen model."""
        self.model = model
        self._hash = hash(model.model_dump_json())

    def __eq__(self, other: object) -> bool:
        """Whether both are keys of equal models."""
        return isinstance(other, Equal) and (self.model is other.model or self.model == other.model)

    def __hash__(self) -> int:
        """Hash of the model's text."""
        return self._hash


_MODEL_KEYS: BoundedCache[Equal] = BoundedCache(256)


def model_key(model: BaseModel) -> Hashable:
    """A key of all values of a frozen model, such as a cluster that a scenario describes in full."""
    return _MODEL_KEYS.get(Same(model), lambda: Equal(model))


def read_only(array: Array) -> Array:
    """The array, which nobody can write from now on."""
    array.setflags(write=False)
    return array


def array_key(array: np.ndarray[Any, Any]) -> Hashable:
    """A key of an array's numbers: its identity where it is read-only, else a digest of its contents."""
    return digest(array) if array.flags.writeable else Same(array)


def digest(array: np.ndarray[Any, Any]) -> Hashable:
    """A key of an array's shape, type and numbers."""
    whole = np.ascontiguousarray(array)
    return (whole.shape, whole.dtype.str, blake2b(whole.tobytes(), digest_size=32).digest())
