from __future__ import annotations

from functools import partial

import numpy as np

from moesim.simulator.common.bounded_cache import BoundedCache, Same, array_key, clear_caches, read_only


def test_the_value_used_longest_ago_goes_first() -> None:
    cache: BoundedCache[str] = BoundedCache(10, len)
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key * 4

    for key in "abacab":  # two values of four fit
        assert cache.get(key, partial(make, key)) == key * 4
    assert made == ["a", "b", "c", "b"] and cache.weight == 8


def test_a_value_heavier_than_the_cache_is_made_every_time() -> None:
    cache: BoundedCache[str] = BoundedCache(3, len)
    made = [cache.get("key", lambda: "heavy"), cache.get("key", lambda: "again")]
    assert made == ["heavy", "again"] and cache.weight == 0


def test_all_caches_can_be_emptied() -> None:
    cache: BoundedCache[int] = BoundedCache(8)
    assert [cache.get(n, lambda: 1) for n in range(4)] == [1] * 4 and cache.weight == 4
    clear_caches()
    assert cache.weight == 0 and cache.get(0, lambda: 2) == 2


def test_arrays_are_equal_keys_by_identity_or_by_their_numbers() -> None:
    one, two = np.arange(6.0), np.arange(6.0)
    assert array_key(one) == array_key(two) != array_key(two.reshape(2, 3))
    one[0] = 7.0
    assert array_key(one) != array_key(two)
    key = array_key(read_only(one))
    assert key == Same(one) != array_key(read_only(two)) and hash(key) == hash(Same(one))
