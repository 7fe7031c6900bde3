"""Exchange between the ranks of a replica."""

from __future__ import annotations

import pytest

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.serving.exchange import Fabric, cache_transfer, collective, expert_exchange
from moesim.simulator.serving.prices import laws

H100 = Fabric(load_cluster("h100-1024"), load_profile("h100-measured"))


def moe() -> MoE:
    """DeepSeek-V3's experts."""
    found = load_model("deepseek-v3").moe
    assert found is not None
    return found


def test_low_latency_is_a_call_and_the_bytes_of_every_chosen_expert() -> None:
    one = expert_exchange(H100, moe(), 7168, 64, 128, "dispatch", low_latency=True)
    law = laws()["dispatch-low-latency-nodes"]
    sent = 128 * 8 * (7168 + 7168 / 128 * 4) * 56 / 64
    assert one.seconds == pytest.approx(law.call_us * 1e-6 + sent / (law.peak * 50e9))
    assert one.busy_s == pytest.approx(laws()["dispatch-low-latency"].call_us * 1e-6) and one.sms == 132
    # DeepEP's README: 173 us on H800, EP64; the table of another cluster: 164 us.
    assert one.seconds == pytest.approx(164e-6, rel=0.03)
    inside = expert_exchange(H100, moe(), 7168, 8, 128, "combine", low_latency=True)
    assert inside.seconds == pytest.approx(67e-6, rel=0.1) and inside.cost.nic_bytes == 0.0


def test_normal_kernels_hold_their_sms_and_go_once_to_a_node() -> None:
    one = expert_exchange(H100, moe(), 7168, 8, 4096, "combine", low_latency=False, sms=24)
    assert one.busy_s == one.seconds and one.sms == 24
    across = expert_exchange(H100, moe(), 7168, 64, 4096, "dispatch", low_latency=False)
    direct = 4096 * 8 * 7392 * 56 / 64
    assert 0 < across.cost.nic_bytes < 0.6 * direct
    assert (
        expert_exchange(H100, moe(), 7168, 144, 512, "dispatch", low_latency=False, redundant=32).seconds > 0
    )
    assert expert_exchange(H100, moe(), 7168, 1, 512, "dispatch", low_latency=False).seconds == 0.0


def test_small_sums_run_in_one_kernel_and_large_ones_as_rings() -> None:
    small, large = (collective(H100, "all_reduce", size, 8) for size in (64 * 1024, 1 << 28))
    assert small.seconds < 10e-6 and "serving.all-reduce" in small.cost.evidence.entries
    assert "serving.all-reduce" not in large.cost.evidence.entries
    assert large.seconds == pytest.approx(2 * (1 << 28) * 7 / 8 / 345e9, rel=0.25)


def test_cards_without_nvlink_exchange_over_pcie() -> None:
    card = load_accelerator("rtx-pro-6000")
    node = H100.cluster.node.model_copy(update={"accelerator": card})
    pcie = Fabric(H100.cluster.model_copy(update={"node": node, "nodes": 1}), H100.profile)
    one = collective(pcie, "all_reduce", 1e6, 2)
    assert pcie.pcie and one.seconds == pytest.approx(20e-6 + 1e6 / (0.5 * 63e9))
    assert any("assumed" in note for note in one.cost.evidence.notes) and one.high_s > one.seconds


def test_a_cache_goes_by_the_nic_or_over_nvlink() -> None:
    far, near = cache_transfer(H100, 1e9), cache_transfer(H100, 1e9, across_nodes=False)
    assert far.cost.nic_bytes == near.cost.scale_up_bytes == 1e9 and near.seconds < far.seconds / 5
