from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.writers.link_loads import sample_choices, sampled_traffic

from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.protocol import transfer_bytes
from moesim.simulator.layout.expert_load import sampled_loads
from moesim.simulator.layout.routing import Gate, expected_targets, group_counts
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.feed_forward.moe import MoE


def moe_of(name: str) -> MoE:
    moe = load_model(name).moe
    assert moe is not None
    return moe


V3_GATE = Gate.of(moe_of("deepseek-v3"))
FP8_ROW, BF16_ROW = 7168 + 4 * 56, 2 * 7168


def test_deepep_test_gate_at_ep64() -> None:
    targets = expected_targets(Gate.deepep_test(8), 64, 8)
    assert targets.distinct_nodes == pytest.approx(3.98, abs=0.005)
    assert targets.distinct_gpus == pytest.approx(7.47, abs=0.005)
    dispatch, combine = (transfer_bytes(targets, 4096, row) for row in (FP8_ROW, BF16_ROW))
    assert dispatch.logical_ib_bytes == pytest.approx(120.5e6, rel=0.002)
    assert dispatch.logical_nvlink_bytes == pytest.approx(226.2e6, rel=0.002)
    assert combine.logical_ib_bytes == pytest.approx(233.7e6, rel=0.002)
    assert combine.logical_nvlink_bytes == pytest.approx(438.6e6, rel=0.002)
    assert dispatch.ib_bytes == pytest.approx(dispatch.logical_ib_bytes * 7 / 8)


def test_one_node_has_no_ib() -> None:
    targets = expected_targets(Gate.deepep_test(1), 8, 8)
    assert (targets.distinct_nodes, targets.distinct_remote_nodes) == (1.0, 0.0)
    links = transfer_bytes(targets, 4096, FP8_ROW)
    assert (links.ib_bytes, links.logical_ib_bytes) == (0.0, 0.0)
    assert links.nvlink_bytes == pytest.approx(links.logical_nvlink_bytes * 7 / 8)


GATES = [
    Gate(64, 6),
    Gate(64, 6, 8, 3, "best"),
    Gate(64, 6, 8, 3, "top2-sum"),
    Gate(64, 6, 8, 3, "top2-sum", "softmax"),
    Gate(64, 6, 4, 4, "best"),
    Gate(60, 6, 6, 3, "best"),
]


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize(("ep", "per_node"), [(4, 2), (4, 4), (20, 4), (16, 8), (12, 4), (2, 1)])
def test_expectation_equals_a_sample_of_choices(gate: Gate, ep: int, per_node: int) -> None:
    if gate.experts % ep:
        with pytest.raises(InputError, match=f"parallel.ep={ep}"):
            expected_targets(gate, ep, per_node)
        return
    targets = expected_targets(gate, ep, per_node)
    gpus = sample_choices(gate, 20_000, seed=1) // (gate.experts // ep)
    for units, expected in ((gpus, targets.distinct_gpus), (gpus // per_node, targets.distinct_nodes)):
        ordered = np.sort(units, axis=1)
        distinct = 1 + (np.diff(ordered, axis=1) > 0).sum(axis=1)
        assert distinct.mean() == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("gate", [*GATES, V3_GATE], ids=str)
def test_group_counts_are_a_distribution(gate: Gate) -> None:
    spread = group_counts(gate)
    assert sum(p for _, p in spread) == pytest.approx(1.0)
    assert all(sum(c) == gate.top_k and len(c) <= gate.groups_per_token for c, _ in spread)


@given(st.sampled_from([2, 4, 8, 16, 32, 64]), st.floats(1, 1e4), st.floats(1, 1e5))
def test_bytes_are_conserved(ep: int, tokens: float, row: float) -> None:
    targets = expected_targets(V3_GATE, ep, 8)
    links = transfer_bytes(targets, tokens, row)
    assert links.nvlink_bytes + links.local_copy_bytes == pytest.approx(links.logical_nvlink_bytes)
    assert links.ib_bytes <= links.logical_ib_bytes
    assert links.logical_nvlink_bytes == pytest.approx(tokens * row * targets.distinct_gpus)


def test_nodes_must_fill() -> None:
    with pytest.raises(InputError, match="fill nodes"):
        expected_targets(Gate(96, 4), 12, 8)


def test_other_rankings_of_the_same_gate() -> None:
    moe = moe_of("deepseek-v3")
    assert Gate.of(moe, "unlimited") == Gate(256, 8)
    assert Gate.of(moe, "best").group_score == "best"
    assert Gate.of(moe_of("qwen3-30b-a3b")) == Gate(128, 8)


def test_load_spread_follows_the_popularity() -> None:
    # A rank averages its 4 experts: cv 0.2 becomes 0.1; multinomial noise adds 1/sqrt(rows).
    assert sampled_loads(0, 4000, 64, 256, 0.2, 0).std() == pytest.approx(0.1, rel=0.03)
    assert sampled_loads(0, 4000, 64, 256, 0.0, 0).std() == 0.0
    assert sampled_loads(0, 4000, 64, 256, 0.0, 10_000).std() == pytest.approx(0.01, rel=0.03)
    assert np.array_equal(sampled_loads(7, 5, 8, 64, 0.3, 100), sampled_loads(7, 5, 8, 64, 0.3, 100))


@pytest.mark.parametrize(
    ("ep", "cv", "rows"),
    [(48, 0.1, 1), (64, -1, 1), (64, float("nan"), 1), (64, 0.1, -1), (64, 0.1, float("inf"))],
)
def test_bad_load_inputs(ep: int, cv: float, rows: float) -> None:
    with pytest.raises(InputError):
        sampled_loads(0, 1, ep, 256, cv, rows)


def test_sampled_traffic_agrees_with_the_expectation() -> None:
    tokens = 100
    traffic = sampled_traffic(V3_GATE, 64, 8, tokens, seed=0)
    links = transfer_bytes(expected_targets(V3_GATE, 64, 8), tokens, 1.0)
    assert traffic.ib.sum() / 64 == pytest.approx(links.ib_bytes, rel=0.01)
    assert traffic.nvlink.sum() / 64 == pytest.approx(links.nvlink_bytes, rel=0.01)
    assert traffic.rows.sum() / 64 == pytest.approx(links.logical_nvlink_bytes, rel=0.01)
