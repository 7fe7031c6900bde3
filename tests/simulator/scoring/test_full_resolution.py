"""Full resolution of the home case against the folded run, two measured networks and a timeline."""

from __future__ import annotations

import pytest

from moesim.simulator.scoring.published_full_resolution import FullChecks, check_full


@pytest.fixture(scope="module")
def checks() -> FullChecks:
    return check_full()


def test_equal_ranks_and_both_networks_agree(checks: FullChecks) -> None:
    """Limits: folded and full within 0.1 %, multi-plane and multi-rail within 0.5 % as measured."""
    assert {d.id.split(".")[0] for d in checks.differences} == {"folded_and_full", "networks"}
    assert [d.id for d in checks.differences if not d.holds] == []


def test_waiting_grows_along_a_pair_as_in_the_timeline(checks: FullChecks) -> None:
    """Three of the four kinds of transfer wait longer with every layer there.

    Before its first transfer a pair also waits for what members sent before it, unlike the timeline
    (docs/validation-notes.md): there the combine of the backward counts from the second layer on.
    """
    assert len(checks.notify) == 16
    for phase in ("combine B", "combine F", "dispatch F"):
        rows = [row for row in checks.notify if row.phase == phase][phase == "combine B" :]
        assert rows[-1].published_s > rows[0].published_s
        assert rows[-1].predicted.p50_s > rows[0].predicted.p50_s
