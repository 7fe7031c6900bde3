"""Cost of the chunked gated delta rule, which the gated delta net and Kimi delta attention share."""

from __future__ import annotations

from moesim.simulator.model.attention.scan import Scan

CHUNK = 64
"""Tokens of a chunk in the kernels of flash-linear-attention (`chunk_size` of fla-core 0.6.0)."""


def delta_rule_scan(
    variant: str, *, heads: int, key_heads: int, key_dim: int, value_dim: int, gates: int
) -> Scan:
    """Scan of a gated delta rule (eq. C22): the WY form of arXiv 2412.06464, section 3.3, in chunks of 64.

    Per token and head, with C tokens a chunk: scores of keys with keys and of queries with keys, C d_k each;
    the inverse of a unit triangle, C^2 / 6; the two products with it, C (d_k + d_v); the scores times the new
    values, C d_v; the state read twice and updated once, d_k d_v each: all times 2. The backward computes the
    products with the inverse and the states again. `gates` counts the decays of one token.
    """
    square, state = CHUNK * CHUNK / 6.0, key_dim * value_dim
    inverse = CHUNK * (key_dim + value_dim)
    products = CHUNK * (2 * key_dim + value_dim) + inverse + square + 3 * state
    return Scan(
        variant=variant,
        heads=heads,
        flop=2.0 * heads * products,
        repeated_flop=2.0 * heads * (inverse + 2 * state),
        inputs=2 * key_heads * key_dim + heads * value_dim + gates + heads,
        outputs=heads * value_dim,
        state_elements=heads * state,
        chunk=CHUNK,
        transition_elements=heads * key_dim * key_dim,
    )
