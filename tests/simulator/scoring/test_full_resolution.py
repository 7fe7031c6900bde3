"""Full resolution of the home case against the folded run, two measured networks and a timeline."""

from __future__ import annotations

from moesim.simulator.scoring.published_full_resolution import FullChecks


def test_equal_ranks_and_both_networks_agree(full_checks: FullChecks) -> None:
    """Limits: folded and full within 0.1 %, multi-plane and multi-rail within 0.5 % as measured."""
    assert {d.id.split(".")[0] for d in full_checks.differences} == {"folded_and_full", "networks"}
    assert [d.id for d in full_checks.differences if not d.holds] == []


def test_waiting_grows_along_a_pair_as_in_the_timeline(full_checks: FullChecks) -> None:
    """Three of the four kinds of transfer wait longer with every layer there.

    Before its first transfer a pair also waits for what members sent before it, unlike the timeline
    (lab/docs/validation-notes.md): there the combine of the backward counts from the second layer on.
    """
    assert len(full_checks.notify) == 16
    for phase in ("combine B", "combine F", "dispatch F"):
        rows = [row for row in full_checks.notify if row.phase == phase][phase == "combine B" :]
        assert rows[-1].published_s > rows[0].published_s
        assert rows[-1].predicted.p50_s > rows[0].predicted.p50_s
