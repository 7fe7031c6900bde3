"""The evidence behind a prediction in one word (app/texts.py)."""

from __future__ import annotations

import pytest

from moesim.app import texts
from moesim.hwmodels.confidence import LEVELS
from moesim.simulator.scenario.presets import shipped_presets


def test_every_level_has_a_word_a_meaning_and_a_badge_of_its_own() -> None:
    assert [texts.word(level) for level in LEVELS] == ["measured", "published", "roofline"]
    badges = {texts.badge(level) for level in LEVELS}
    assert len(badges) == len(LEVELS)
    for level in LEVELS:
        assert texts.word(level) in texts.badge(level)  # never by colour alone
        assert ":material/" in texts.badge(level)
        assert texts.meaning(level)
    with pytest.raises(KeyError):
        texts.word("guessed")


def test_only_roofline_is_muted() -> None:
    assert [level for level in LEVELS if texts.muted(level)] == ["peak-only"]


def test_every_preset_has_a_word() -> None:
    assert {texts.word(row.confidence) for row in shipped_presets()} <= set(texts.MEANINGS)
