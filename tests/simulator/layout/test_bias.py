from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.popularity import TOKEN_SCALE, bias_dynamics, check_gate, choice_probabilities
from moesim.simulator.model.catalogue import load_model

V3: dict[str, Any] = {"layers": 4, "experts": 256, "top_k": 8, "drift_steps": 1e9, "affinity_spread": 0.5}


def test_the_rule_balances_what_it_would_not_balance_without() -> None:
    led, free = (bias_dynamics(**V3, gamma=gamma, steps=800) for gamma in (0.001, 0.0))
    assert np.array_equal(led.max_vio[0], free.max_vio[0]) and led.max_vio[0].min() > 1.0
    assert np.allclose(free.max_vio[-1], free.max_vio[0], rtol=1e-3)
    assert led.max_vio[-1].max() < 0.06
    assert (free.bias == 0).all() and led.bias.min() < 0 < led.bias.max()


def test_shares_are_those_of_the_last_step_and_repeat() -> None:
    run, again, other = (bias_dynamics(**V3, gamma=0.001, steps=20, seed=seed) for seed in (3, 3, 4))
    assert run.popularity.shape == (1, 4, 256) and run.max_vio.shape == (20, 4)
    assert np.allclose(run.popularity.sum(axis=2), 1.0) and (run.popularity <= 1 / 8 + 1e-9).all()
    assert np.allclose(run.popularity.max(axis=2) * 256 - 1, run.max_vio[-1:])
    assert np.array_equal(again.popularity, run.popularity)
    assert not np.array_equal(other.popularity, again.popularity)


def test_the_common_threshold_agrees_with_a_sampled_top_k() -> None:
    """Mean field against what the gate does: 200,000 tokens pick their 8 best biased scores."""
    rng = np.random.default_rng(1)
    affinity, bias = 0.5 * rng.standard_normal((1, 64)), 0.02 * rng.standard_normal((1, 64))
    expected, _ = choice_probabilities(affinity, bias, 8, np.array([[0.5]]))
    assert expected.sum() == pytest.approx(8.0, rel=1e-8)
    counts = np.zeros(64)
    for _ in range(10):
        draw = rng.random((20_000, 64))
        logits = affinity + TOKEN_SCALE * np.log(draw / (1 - draw))
        scores = 1 / (1 + np.exp(-logits)) + bias
        counts += np.bincount(np.argpartition(-scores, 7, axis=1)[:, :8].ravel(), minlength=64)
    sampled = counts / 200_000
    # The threshold varies from token to token among 64 experts; that flattens the most popular ones a little.
    assert np.abs(sampled / expected[0] - 1).max() < 0.12
    assert np.corrcoef(sampled, expected[0])[0, 1] > 0.999


def test_extreme_biases_still_choose_top_k() -> None:
    bias = np.array([[5.0, 5.0, 0.0, 0.0, -5.0, -5.0, 0.0, 0.0]])
    chosen, _ = choice_probabilities(np.zeros((1, 8)), bias, 4, np.array([[0.5]]))
    assert chosen.sum() == pytest.approx(4.0, abs=1e-6)
    assert (chosen[0, :2] > 0.99).all() and (chosen[0, 4:6] < 0.01).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "step=0"),
        ({"steps": 20_001}, "20000"),
        ({"affinity_spread": -1.0}, "affinity_spread=-1.0"),
        ({"affinity_spread": float("nan")}, "affinity_spread=nan"),
        ({"drift_steps": 0.0}, "drift_steps=0.0"),
        ({"gamma": 2.0}, "gamma=2.0"),
    ],
)
def test_numbers_out_of_range(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        bias_dynamics(**{**V3, "gamma": 0.001, "steps": 10, **changes})


def test_the_rule_is_for_sigmoid_gates() -> None:
    v3, mixtral = load_model("deepseek-v3").moe, load_model("mixtral-8x22b").moe
    assert v3 is not None and mixtral is not None
    check_gate(v3)
    with pytest.raises(InputError, match="softmax"):
        check_gate(mixtral)
