"""Auxiliary-loss-free balancing: how the load of experts moves while a bias on the selection follows it."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, pi, sqrt

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.model.feed_forward.moe import MoE

BIAS_STREAM = 4
"""Part of the seed of the affinities."""

MOST_STEPS = 20_000
"""About 10 s of work for 59 layers of 256 experts."""

DECIMALS = 12
"""Shares are rounded here: the last digits of an exponential differ between processors, and the sign of a
difference from balance must not."""

TOKEN_SCALE = sqrt(3.0) / pi
"""Scale of a logistic distribution with variance 1: how a token's affinity to an expert varies."""


@dataclass(frozen=True, slots=True)
class BiasRun:
    """Load during training steps 0 to steps - 1.

    `popularity` [recorded, layers, experts]: shares of the rows in the last steps, each summing to 1;
    `max_vio` [steps, layers]: load of the busiest expert over the mean, less 1; `bias` [layers, experts]
    after the last step.
    """

    popularity: FloatArray
    max_vio: FloatArray
    bias: FloatArray


def bias_dynamics(
    *,
    layers: int,
    experts: int,
    top_k: int,
    affinity_spread: float,
    drift_steps: float,
    gamma: float,
    steps: int,
    record: int = 1,
    seed: int = 0,
) -> BiasRun:
    """Load of every expert while the bias on its score rises by `gamma` when underloaded and falls when not.

    Rule: V3 section 2.1.2, with the load of the whole batch of a step. Model of the scores (eqs. R5, R6):
    the affinity of a token to expert e is a logistic variable of variance 1 around mu_e, its score the
    sigmoid; mu_e wanders as a stationary first-order process with standard deviation `affinity_spread`
    that forgets over `drift_steps` steps. All tokens share the threshold that lets top_k experts through
    on average (many experts); groups of experts are not limited. Raises InputError for numbers out of
    range.
    """
    if not 1 <= record <= steps <= MOST_STEPS:
        raise InputError(
            f"routing.load.step={steps} is outside 1 to {MOST_STEPS}, or record={record} outside 1 to step; "
            "the load forgets its start within a few drift_steps, so fewer steps do"
        )
    if not (0 <= affinity_spread <= 5 and 1 <= drift_steps < 1e12 and 0 <= gamma <= 1):
        raise InputError(
            f"routing.load: affinity_spread={affinity_spread} must be 0 to 5, drift_steps={drift_steps} at "
            f"least 1, gamma={gamma} 0 to 1"
        )
    rng = np.random.default_rng([seed, BIAS_STREAM])
    kept = exp(-1.0 / drift_steps)
    affinity = affinity_spread * rng.standard_normal((layers, experts))
    bias = np.zeros((layers, experts))
    threshold = np.full((layers, 1), 0.5)
    popularity = np.empty((record, layers, experts))
    max_vio = np.empty((steps, layers))
    for step in range(steps):
        if step:
            fresh = rng.standard_normal((layers, experts))
            affinity = kept * affinity + affinity_spread * sqrt(1.0 - kept * kept) * fresh
        chosen, threshold = choice_probabilities(affinity, bias, top_k, threshold)
        shares = np.round(chosen / chosen.sum(axis=1, keepdims=True), DECIMALS)
        max_vio[step] = shares.max(axis=1) * experts - 1.0
        if step >= steps - record:
            popularity[step - (steps - record)] = shares
        bias = bias + gamma * np.sign(round(1.0 / experts, DECIMALS) - shares)
    return BiasRun(popularity, max_vio, bias)


def choice_probabilities(
    affinity: FloatArray, bias: FloatArray, top_k: int, start: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """(chance that a token picks each expert [layers, experts], threshold of the biased score [layers, 1]).

    Eq. R5; Newton's method from the thresholds `start` of the step before, kept inside a bracket.
    """
    low, high = bias.min(axis=1, keepdims=True), bias.max(axis=1, keepdims=True) + 1.0
    threshold = np.clip(start, low + 1e-9, high - 1e-9)
    tiny = 1e-12
    close = False
    for _ in range(200):
        score = np.clip(threshold - bias, tiny, 1.0 - tiny)
        # exp((logit(score) - affinity) / scale), as a power of the odds.
        beaten = (score / (1.0 - score)) ** (1.0 / TOKEN_SCALE) * np.exp(-affinity / TOKEN_SCALE)
        chosen = 1.0 / (1.0 + beaten)
        excess = chosen.sum(axis=1, keepdims=True) - top_k
        if close:
            break
        # One step more doubles the digits: then nothing hangs on where exactly the search stopped.
        close = bool(np.abs(excess).max() < 1e-9 * top_k)
        low, high = np.where(excess > 0, threshold, low), np.where(excess > 0, high, threshold)
        slope = (chosen * (1.0 - chosen) / (score * (1.0 - score))).sum(axis=1, keepdims=True) / TOKEN_SCALE
        following = threshold + excess / np.maximum(slope, tiny)
        inside = (following >= low) & (following <= high)
        threshold = np.where(inside, following, (low + high) / 2.0)
    return chosen, threshold


def check_gate(moe: MoE) -> None:
    """Raise InputError where the model's gate has no sigmoid scores, which the bias rule is made for."""
    if moe.scoring != "sigmoid":
        raise InputError(
            f"routing.load.kind=bias: the gate has {moe.scoring} scores; the bias rule is defined on sigmoid "
            "scores (DeepSeek-V3); use uniform, zipf or histogram"
        )
