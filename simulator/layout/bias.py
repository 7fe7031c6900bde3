"""Simulates auxiliary-loss-free balancing: a bias on each expert's score that counteracts its load."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, pi, sqrt

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.model.feed_forward.moe import MoE

BIAS_STREAM = 4
"""Part of the seed for the draws of the affinities."""

MOST_STEPS = 20_000
"""Largest number of simulated steps; 59 layers of 256 experts then take about 10 s."""

DECIMALS = 12
"""Shares are rounded to this many decimals. Processors differ in the last digits of an exponential, and the
bias follows the sign of a difference, which must be the same on all of them."""

TOKEN_SCALE = sqrt(3.0) / pi
"""Scale of the logistic distribution of a token's affinity to an expert, whose variance is 1."""


@dataclass(frozen=True, slots=True)
class BiasRun:
    """Expert load during the training steps from 0 to steps - 1.

    `popularity` [recorded, layers, experts] holds the experts' shares of the rows in the last steps (each row
    sums to 1), `max_vio` [steps, layers] the load of the busiest expert over the mean, less 1, and `bias`
    [layers, experts] the bias after the last step.
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
    """Simulate expert load under a bias that rises by `gamma` for an underloaded expert and falls otherwise.

    The rule is that of the DeepSeek-V3 report, section 2.1.2, applied to the load of the whole batch of a
    step. In the model of the scores (eqs. R5, R6) the affinity of a token to expert e is a logistic variable
    with mean mu_e and variance 1, and its score is the sigmoid of it. mu_e follows a stationary first-order
    autoregressive process with standard deviation `affinity_spread` and a memory of `drift_steps` steps. All
    tokens share one threshold, which top_k experts pass on average; groups of experts are not limited.
    Raises InputError for numbers out of range.
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
    retained = exp(-1.0 / drift_steps)
    affinity = affinity_spread * rng.standard_normal((layers, experts))
    bias = np.zeros((layers, experts))
    threshold = np.full((layers, 1), 0.5)
    popularity = np.empty((record, layers, experts))
    max_vio = np.empty((steps, layers))
    for step in range(steps):
        if step:
            fresh = rng.standard_normal((layers, experts))
            affinity = retained * affinity + affinity_spread * sqrt(1.0 - retained * retained) * fresh
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
    """Solve eq. R5 for the threshold by Newton's method, from the thresholds `start` of the previous step.

    Returns the probability that a token picks each expert [layers, experts], and the threshold of the biased
    score [layers, 1]. The iteration stays inside a bracket.
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
        # A last step doubles the correct digits, so that the result does not depend on where the search ends.
        close = bool(np.abs(excess).max() < 1e-9 * top_k)
        low, high = np.where(excess > 0, threshold, low), np.where(excess > 0, high, threshold)
        slope = (chosen * (1.0 - chosen) / (score * (1.0 - score))).sum(axis=1, keepdims=True) / TOKEN_SCALE
        following = threshold + excess / np.maximum(slope, tiny)
        inside = (following >= low) & (following <= high)
        threshold = np.where(inside, following, (low + high) / 2.0)
    return chosen, threshold


def check_gate(moe: MoE) -> None:
    """Raise InputError unless the model's gate has sigmoid scores, on which the bias rule is defined."""
    if moe.scoring != "sigmoid":
        raise InputError(
            f"routing.load.kind=bias: the gate has {moe.scoring} scores; the bias rule is defined on sigmoid "
            "scores (DeepSeek-V3); use uniform, zipf or histogram"
        )
