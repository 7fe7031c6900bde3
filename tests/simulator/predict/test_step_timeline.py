"""The step as rows to draw: they are the engine's own times."""

from __future__ import annotations

from itertools import pairwise

import pytest

import moesim

HOME = ("deepseek-v3-2048xh800", "batch.sequences=4096")


def test_actions_of_a_rank_follow_each_other_and_fill_what_is_no_bubble() -> None:
    found, result = moesim.timeline(*HOME), moesim.simulate(*HOME)
    assert found.step_s == result.step.time_s
    for rank in (0, 7, 15):
        bars = sorted((b for b in found.actions if b.row == str(rank)), key=lambda bar: bar.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(bars))
    assert max(bar.end_s for bar in found.actions) == pytest.approx(found.step_s)
    counts = {bar.kind for bar in found.actions}
    assert {"F", "F&B", "optimizer"} <= counts


def test_the_zoomed_pair_has_its_phases_on_two_streams() -> None:
    found = moesim.timeline(*HOME, rank=3)
    assert found.zoomed_rank == 3
    streams = {bar.row for bar in found.zoomed}
    assert {"compute stream", "communication stream"} <= streams
    for stream in streams:
        bars = sorted((b for b in found.zoomed if b.row == stream), key=lambda bar: bar.start_s)
        assert all(a.end_s <= b.start_s + 1e-8 for a, b in pairwise(bars))
    kinds = {bar.kind for bar in found.zoomed}
    assert {"attn F", "mlp I", "mlp W", "dispatch F", "combine B"} <= kinds
    assert any(kind.startswith("wait for ") for kind in kinds)
    pair = next(
        b
        for b in found.actions
        if b.row == "3" and b.kind == "F&B" and b.start_s <= found.zoomed[0].start_s < b.end_s
    )
    assert max(bar.end_s for bar in found.zoomed) <= pair.end_s + 1e-8


def test_full_resolution_and_a_rank_that_is_not_there() -> None:
    small = (*HOME, "cluster.nodes=32", "parallel.ep=16", "batch.sequences=512", "resolution=full")
    found = moesim.timeline(*small, rank=99)
    assert found.zoomed_rank == found.ranks - 1
    assert found.zoomed
