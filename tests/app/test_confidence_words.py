"""The evidence behind a prediction in one word (app/confidence.py)."""

from __future__ import annotations

import pytest

from moesim.app import confidence
from moesim.hwmodels.confidence import LEVELS
from moesim.simulator.scenario.presets import shipped_presets


def test_every_level_has_a_word_a_meaning_and_a_badge_of_its_own() -> None:
    assert [confidence.word(level) for level in LEVELS] == ["measured", "published", "roofline"]
    badges = {confidence.badge(level) for level in LEVELS}
    assert len(badges) == len(LEVELS)
    for level in LEVELS:
        assert confidence.word(level) in confidence.badge(level)  # never by colour alone
        assert ":material/" in confidence.badge(level)
        assert confidence.meaning(level)
    with pytest.raises(KeyError):
        confidence.word("guessed")


def test_only_roofline_is_muted() -> None:
    assert [level for level in LEVELS if confidence.muted(level)] == ["peak-only"]


def test_every_preset_has_a_word() -> None:
    assert {confidence.word(row.confidence) for row in shipped_presets()} <= set(confidence.MEANINGS)
