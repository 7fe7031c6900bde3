from __future__ import annotations

from itertools import product

import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies.description import SWITCHED
from moesim.hwmodels.topologies.scale_up_parts import MeshShares
from moesim.hwmodels.topologies.torus import TorusShares

MESH = MeshShares(1 / 7, 8)  # eight MI300X
TORUS = TorusShares(1 / 6, (8, 16, 16))  # a slice of TPU v5p
SMALL = TorusShares(1 / 4, (4, 4))


def worst_link_load(sizes: tuple[int, ...], wraps: tuple[bool, ...]) -> float:
    """Busiest directed link of a uniform all-to-all by dimension-order routes, counted chip by chip.

    In units of what one chip sends; ties around a ring go half each way.
    """
    chips = list(product(*(range(n) for n in sizes)))
    load: dict[tuple[tuple[int, ...], int, int], float] = {}
    for src in chips:
        for dst in chips:
            if src == dst:
                continue
            at = list(src)
            for axis, n in enumerate(sizes):
                ahead = (dst[axis] - at[axis]) % n
                ways: list[tuple[int, float, int]] = []
                if not wraps[axis]:
                    step = 1 if dst[axis] > at[axis] else -1
                    ways = [(step, 1.0, abs(dst[axis] - at[axis]))]
                elif 2 * ahead == n:
                    ways = [(1, 0.5, ahead), (-1, 0.5, ahead)]
                else:
                    ways = [(1, 1.0, ahead)] if 2 * ahead < n else [(-1, 1.0, n - ahead)]
                for step, share, hops in ways:
                    place = list(at)
                    for _ in range(hops):
                        key = (tuple(place), axis, step)
                        load[key] = load.get(key, 0.0) + share
                        place[axis] = (place[axis] + step) % n
                at[axis] = dst[axis]
    return max(load.values()) / (len(chips) - 1)


@pytest.mark.parametrize(
    ("torus", "block"),
    [
        ((4, 4), (4, 4)),
        ((4, 4), (2, 4)),
        ((8, 4), (4, 4)),
        ((5, 3), (5, 3)),
        ((4, 4, 4), (4, 4, 4)),
        ((6, 6), (3, 3)),
    ],
)
def test_the_cut_of_a_torus_equals_the_busiest_link_of_routes(
    torus: tuple[int, ...], block: tuple[int, ...]
) -> None:
    n = 1
    for side in block:
        n *= side
    wraps = tuple(side == size and size >= 3 for side, size in zip(block, torus, strict=True))
    expected = worst_link_load(block, wraps)
    shares = TorusShares(0.01, torus)  # far below the cap of one GPU's whole rate
    best = max(
        0.01 / worst_link_load(b, tuple(s == t and t >= 3 for s, t in zip(b, torus, strict=True)))
        for b in shares._blocks(n)
    )
    assert shares.all_to_all(n) == pytest.approx(best)
    assert shares.all_to_all(n) >= 0.01 / expected * (1 - 1e-12)


def test_a_cube_of_64_chips_of_a_larger_torus_gets_one_link() -> None:
    """4x4x4 without wrap: half of the bytes cross 16 links from 32 chips, so 63/64 of a link a chip."""
    assert TORUS.all_to_all(64) == pytest.approx(1 / 6 * 63 / 64)
    assert TorusShares(1 / 6, (4, 4, 4)).all_to_all(64) == pytest.approx(2 / 6 * 63 / 64)


def test_mesh_and_switch() -> None:
    assert [MESH.all_to_all(n) for n in (2, 4, 8)] == pytest.approx([1 / 7, 3 / 7, 1.0])
    assert MESH.ring(8) == 1.0 and MESH.ring(2) == MESH.pair() == pytest.approx(1 / 7)
    assert SWITCHED.all_to_all(72) == SWITCHED.ring(72) == SWITCHED.pair() == 1.0
    assert all(shares.all_to_all(1) == shares.ring(1) == 1.0 for shares in (MESH, TORUS, SWITCHED))


def test_rings_use_the_dimensions_that_they_span() -> None:
    assert TORUS.ring(2048) == pytest.approx(1.0)  # three rings, both ways
    assert TORUS.ring(2) == pytest.approx(1 / 6)  # one cable
    assert TORUS.ring(8) == pytest.approx(3 / 6)  # 2x2x2; a ring of 8 in x alone has 2 of the 6 links
    assert TORUS.ring(16) == pytest.approx(3 / 6)  # 8 around and 2 across
    assert SMALL.ring(3) == pytest.approx(1 / 4)  # no block: one link


def test_a_group_that_is_no_block_is_refused_by_its_number() -> None:
    with pytest.raises(InputError, match=r"a group of 24 chips is no block of the 8x16x16 torus"):
        TORUS.all_to_all(24)


def test_shares_never_exceed_the_rate_of_the_gpu() -> None:
    assert SMALL.all_to_all(2) <= 1.0
