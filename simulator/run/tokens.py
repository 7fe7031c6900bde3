"""How many tokens a run is taken to have where nobody says."""

from __future__ import annotations

from moesim.simulator.model.counts import parameters_activated
from moesim.simulator.model.shape import ModelShape

TOKENS_PER_PARAMETER = 20
"""Compute-optimal for dense models: Hoffmann et al., arXiv 2203.15556, Table 3 (1.5 T tokens for 67 B)."""


def assumed_tokens(shape: ModelShape) -> int:
    """Tokens from the parameters that a token meets: an assumption, less than most models get."""
    return TOKENS_PER_PARAMETER * parameters_activated(shape, embedding=True)
