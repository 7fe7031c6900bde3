"""Gathers and reductions of model chunks hide behind the chunks that run meanwhile."""

from __future__ import annotations

import pytest

from moesim.simulator.cost.data_parallel import ChunkPlace, ChunkTimes, exposed_gathers, exposed_reductions
from moesim.simulator.cost.overlap import OverlapSlowDown, exposed_behind_window

FREE = OverlapSlowDown(0.0)
LOST = OverlapSlowDown(0.2)


def test_one_chunk_of_the_first_rank_hides_by_buckets() -> None:
    chunks, place = ChunkTimes((1.0,), (4.0,)), ChunkPlace(0, 1, 5)
    assert exposed_gathers(chunks, place, LOST) == exposed_behind_window(1.0, 4.0, 5, LOST)
    assert exposed_reductions(chunks, place, LOST) == exposed_behind_window(1.0, 4.0, 5, LOST)


def test_later_ranks_gather_while_they_wait_for_their_first_activation() -> None:
    chunks = ChunkTimes((1.0,), (0.3,))
    exposed = [exposed_gathers(chunks, ChunkPlace(rank, 1, 1), FREE) for rank in range(5)]
    assert exposed == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.0])


def test_later_ranks_reduce_their_first_chunk_after_the_last_backward() -> None:
    chunks = ChunkTimes((1.0,), (5.0,))
    assert exposed_reductions(chunks, ChunkPlace(3, 1, 4), LOST) == 1.0
    assert exposed_reductions(chunks, ChunkPlace(0, 1, 4), FREE) == pytest.approx(0.25)


def test_a_second_chunk_hides_behind_the_passes_of_the_first() -> None:
    """With 4 micro-batches of 0.5 s before it is needed, the second gather is hidden and costs its loss."""
    place = ChunkPlace(1, 4, 1)
    one = exposed_gathers(ChunkTimes((1.0,), (0.5,)), place, LOST)
    two = exposed_gathers(ChunkTimes((1.0, 1.0), (0.5, 0.5)), place, LOST)
    assert two == pytest.approx(one + 0.2)
    slow = exposed_gathers(ChunkTimes((1.0, 9.0), (0.5, 0.5)), place, FREE)
    assert slow == pytest.approx(0.5 + 9.0 - 2.0)  # needed at idle 0.5 + 4 x 0.5 + exposed 0.5, begun at 1.0


def test_reductions_of_later_chunks_delay_the_first_only_where_they_last_too_long() -> None:
    place = ChunkPlace(1, 4, 1)
    assert exposed_reductions(ChunkTimes((1.0, 2.0), (0.5, 0.5)), place, FREE) == pytest.approx(1.0)
    assert exposed_reductions(ChunkTimes((1.0, 3.0), (0.5, 0.5)), place, FREE) == pytest.approx(2.0)


def test_the_optimizer_of_other_chunks_hides_the_first_gather() -> None:
    chunks, place = ChunkTimes((1.0, 1.0), (0.5, 0.5)), ChunkPlace(0, 4, 1)
    without = exposed_gathers(chunks, place, FREE)
    assert exposed_gathers(chunks, place, FREE, update_s=0.4) == pytest.approx(without - 0.4)
