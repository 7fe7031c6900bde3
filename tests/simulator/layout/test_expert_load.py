from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.eplb import imbalance, plan_placement
from moesim.simulator.layout.expert_load import (
    LoadSpec,
    RankLoads,
    barrier_wait_s,
    draw_rank_loads,
    expected_barrier_wait_s,
    sampled_loads,
)
from moesim.simulator.layout.popularity import capped_shares, zipf_shares
from moesim.simulator.layout.routing import Gate, expected_targets

SMALL: dict[str, Any] = {
    "seed": 0, "group": 0, "layers": 3, "microbatches": 5, "ep": 8, "gpus_per_node": 4, "experts": 32,
    "top_k": 4, "rows_per_rank": 4096.0,
}  # fmt: skip
EVEN = np.full((1, 1, 32), 1 / 32)


def draw(spec: LoadSpec, **changes: Any) -> RankLoads:
    return draw_rank_loads(spec, **{**SMALL, **changes})


def test_the_default_is_what_it_always_was() -> None:
    spec = LoadSpec(0.16)
    loads = draw(spec, seed=7)
    assert np.array_equal(loads.rows, sampled_loads(7, 15, 8, 32, 0.16, 4096.0))
    assert loads.tokens_in is loads.rows and loads.dropped == 0.0
    assert np.array_equal(draw(LoadSpec(0.0)).rows, np.ones((15, 8)))
    assert LoadSpec(0.0).even and not spec.even


@settings(max_examples=30)
@given(
    st.integers(0, 2**32), st.integers(0, 31), st.floats(0, 2), st.floats(0, 2), st.booleans(),
)  # fmt: skip
def test_every_sample_averages_one_and_repeats(
    seed: int, group: int, exponent: float, cv: float, balanced: bool
) -> None:
    popularity = zipf_shares(exponent, 3, 32, 4, seed)
    placement = plan_placement(popularity, ranks=8, redundant_experts=8) if balanced else None
    spec = LoadSpec(cv, popularity[None], placement)
    loads = draw(spec, seed=seed, group=group)
    assert loads.rows.shape == loads.tokens_in.shape == (15, 8)
    assert np.allclose(loads.rows.mean(axis=1), 1.0) and (loads.rows >= 0).all()
    nodes = loads.rows.reshape(15, 2, 4).mean(axis=2)
    assert np.allclose(loads.node_rows[:, ::4], nodes) and np.allclose(loads.node_rows[:, 3::4], nodes)
    again = draw(spec, seed=seed, group=group)
    assert np.array_equal(loads.rows, again.rows) and np.array_equal(loads.tokens_in, again.tokens_in)


def test_popularity_is_the_layers_and_noise_the_groups() -> None:
    spec = LoadSpec(0.05, zipf_shares(0.8, 3, 32, 4, 0)[None])
    first, second = (draw(spec, group=g, microbatches=400).rows.reshape(3, 400, 8) for g in (0, 1))
    assert np.allclose(first.mean(axis=1), second.mean(axis=1), rtol=0.02)
    assert not np.allclose(first[0].mean(axis=0), first[1].mean(axis=0), rtol=0.02)
    noise = [(x / x.mean(axis=1, keepdims=True) - 1).ravel() for x in (first, second)]
    assert abs(np.corrcoef(noise)[0, 1]) < 0.05
    plain = [draw(LoadSpec(0.3), group=group).rows for group in (0, 1)]
    assert not np.allclose(plain[0], plain[1])


def test_mean_rows_follow_the_popularity() -> None:
    popularity = zipf_shares(0.6, 3, 32, 4, 3)
    loads = draw(LoadSpec(0.1, popularity[None]), microbatches=2000)
    expected = popularity.reshape(3, 8, 4).sum(axis=2) * 8
    assert np.allclose(loads.rows.reshape(3, 2000, 8).mean(axis=1), expected, rtol=0.01)


def test_replicas_share_the_rows_of_a_hot_expert() -> None:
    popularity = capped_shares(np.array([[8.0] + [1.0] * 31]) / 39, 4)
    before = draw(LoadSpec(0.0, popularity[None]), layers=1, rows_per_rank=0).rows
    placement = plan_placement(popularity, ranks=8, redundant_experts=8)
    after = draw(LoadSpec(0.0, popularity[None], placement), layers=1, rows_per_rank=0).rows
    assert before.max() == pytest.approx(8 * 11 / 39)
    assert after.max() == pytest.approx(imbalance(placement.rank_load(popularity))[0]) and after.max() < 1.2


def test_tokens_in_are_those_of_the_gate_where_routing_is_even() -> None:
    loads = draw(LoadSpec(0.0, EVEN), rows_per_rank=0)
    assert np.allclose(loads.tokens_in, 1.0)
    # The baseline of the ratio takes a token's choices as independent: close to the exact count at home.
    exact = expected_targets(Gate(256, 8), 64, 8).distinct_gpus
    assert pytest.approx(exact, rel=0.01) == 64 * (1 - (1 - 8 / 256) ** 4)
    hot = draw(LoadSpec(0.0, zipf_shares(1.0, 3, 32, 4, 0)[None]), rows_per_rank=0)
    per_token = hot.tokens_in * (1 - (1 - 4 / 32) ** 4)
    rows_per_token = hot.rows * 4 / 8
    assert (per_token <= rows_per_token + 1e-12).all(), "a token that chose two experts of a rank comes once"
    assert (per_token <= 1 + 1e-12).all() and per_token.max() > 0.95
    assert (per_token >= np.minimum(rows_per_token, 1) * (1 - np.exp(-1))).all()


@settings(max_examples=30)
@given(st.sampled_from(["expert", "rank"]), st.floats(0.2, 3), st.integers(0, 99))
def test_capacity_drops_what_is_above_it(per: Any, factor: float, seed: int) -> None:
    popularity = zipf_shares(0.7, 3, 32, 4, seed)[None]
    free = draw(LoadSpec(0.1, popularity), seed=seed)
    tight = draw(LoadSpec(0.1, popularity, None, factor, per), seed=seed)
    assert tight.dropped == pytest.approx(1 - tight.rows.mean(), abs=1e-12)
    assert (tight.rows <= free.rows + 1e-12).all() and (tight.tokens_in <= free.tokens_in + 1e-12).all()
    assert tight.rows.max() <= factor + 1e-9
    if per == "rank":
        assert np.allclose(tight.rows, np.minimum(free.rows, factor))


def test_rows_bytes_and_waits() -> None:
    rows = np.array([[0.5, 1.5], [1.0, 1.0]])
    loads = RankLoads(rows, np.ones((2, 2)), rows * 0.9, 0.0)
    assert np.array_equal(barrier_wait_s(loads, 2.0), [[2.0, 0.0], [0.0, 0.0]])
    assert np.array_equal(expected_barrier_wait_s(loads, 2.0), [1.0, 0.0])


@settings(max_examples=60)
@given(st.integers(1, 8), st.lists(st.floats(1e-6, 1e6), min_size=8, max_size=8))
def test_no_expert_gets_more_rows_than_there_are_tokens(top_k: int, weights: list[float]) -> None:
    shares = np.array([weights]) / sum(weights)
    out = capped_shares(shares, top_k)
    assert out.max() <= 1 / top_k * (1 + 1e-9) and out.sum() == pytest.approx(1.0)
    if shares.max() <= 1 / top_k:
        assert np.array_equal(out, shares)
    order = np.argsort(shares[0], kind="stable")
    assert (np.diff(out[0][order]) >= -1e-12).all(), "popularity keeps its order"


def test_zipf() -> None:
    shares = zipf_shares(1.0, 1, 64, 2, 0, shuffle_per_layer=False)[0]
    assert shares[1] / shares[3] == pytest.approx(2.0) and (np.diff(shares) <= 0).all()
    two = zipf_shares(1.0, 2, 64, 2, 0)
    assert np.allclose(np.sort(two, axis=1), np.sort(shares)[None]) and not np.array_equal(*two)
    assert np.allclose(zipf_shares(0.0, 2, 64, 2, 0), 1 / 64)
    for bad in (-0.1, 10.5, float("nan")):
        with pytest.raises(InputError, match="exponent"):
            zipf_shares(bad, 1, 64, 2, 0)


@pytest.mark.parametrize(
    ("spec", "changes", "words"),
    [
        (LoadSpec(0.1), {"ep": 5}, "parallel.ep=5"),
        (LoadSpec(0.1), {"gpus_per_node": 3}, "fill nodes"),
        (LoadSpec(-0.1), {}, "expert_cv=-0.1"),
        (LoadSpec(0.1), {"rows_per_rank": float("nan")}, "rows_per_rank"),
        (LoadSpec(0.1), {"top_k": 33}, "top_k=33"),
        (LoadSpec(0.1, EVEN, None, 0.0), {}, "capacity"),
        (LoadSpec(0.1, EVEN[:, :, :16]), {}, "popularity has shape"),
        (LoadSpec(0.1, np.repeat(EVEN, 2, axis=1)), {}, "popularity has shape"),
        (LoadSpec(0.1, EVEN, plan_placement(EVEN[0], ranks=4)), {}, "placement is for 4 ranks"),
    ],
)
def test_what_cannot_be_drawn(spec: LoadSpec, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        draw(spec, **changes)
