"""Dispatchers over EFA: published tables, narrow rows, polling threads, refusals, defaults."""

from __future__ import annotations

import pytest

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.node import load_node
from moesim.simulator.cost.launches import BESIDE_POLLING, polled_share
from moesim.simulator.cost.library_collectives import all_to_all_price
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.dispatchers.protocol import EpOperation, Links
from moesim.simulator.layout.dispatch_limits import check_dispatcher
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.routing import Gate
from moesim.simulator.model.precision import Format
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scoring.published import KernelBenchmark, benchmark_seconds

MACHINES = {
    "H100": ("aws-p5", "efa-v2-100g", "hopper-communication"),
    "H200": ("aws-p5en", "efa-v3-200g", "hopper-communication"),
    "B300": ("aws-p6-b300", "efa-v4-400g", "generic-roofline"),
}


def run(
    gpu: str, kernels: str, operation: EpOperation, nodes: int, tokens: float = 4096.0, hidden: int = 7168
) -> KernelBenchmark:
    wire: Format = "fp8" if gpu == "H200" and operation == "dispatch" else "bf16"
    ranks, gate = 8 * nodes, Gate.deepep_test(nodes)
    node, network, profile = MACHINES[gpu]
    return KernelBenchmark(
        operation, kernels, ranks, tokens, hidden, gate, wire, 24, node, network, profile, "torch API"
    )


@pytest.mark.parametrize(
    ("gpu", "nodes", "kernels", "dispatch", "combine"),
    [
        ("B300", 2, "deepep-2025-04", 126.6, 106.4),
        ("B300", 8, "deepep-2025-04", 84.2, 73.1),
        ("B300", 2, "uccl-ep", 91.9, 59.6),
        ("B300", 4, "uccl-ep", 102.1, 95.3),
        ("H100", 4, "deepep-2025-04", 43.7, 46.1),
        ("H100", 8, "uccl-ep", 29.9, 26.7),
        ("H200", 2, "uccl-ep", 50.0, 18.0),
    ],
)
def test_the_tables_that_gave_the_figures_come_out_of_them(
    gpu: str, nodes: int, kernels: str, dispatch: float, combine: float
) -> None:
    operations: tuple[tuple[EpOperation, float], ...] = (("dispatch", dispatch), ("combine", combine))
    for operation, measured in operations:
        one = run(gpu, kernels, operation, nodes)
        assert one.logical_bytes / benchmark_seconds(one) / 1e9 == pytest.approx(measured, rel=0.06)


def test_narrow_rows_and_few_tokens_take_longer_a_byte_the_more_so_with_slow_proxies() -> None:
    def a_byte(kernels: str, tokens: float, hidden: int) -> float:
        one = run("H100", kernels, "combine", 2, tokens, hidden)
        return benchmark_seconds(one) / one.logical_bytes

    for kernels in ("deepep-2025-04", "uccl-ep"):
        wide, narrow, few = (a_byte(kernels, *size) for size in ((4096, 7168), (4096, 2048), (512, 2048)))
        assert wide < narrow < few
    assert a_byte("uccl-ep", 512, 2048) > 2.0 * a_byte("deepep-2025-04", 512, 2048)


def test_an_all_to_all_of_nccl_has_its_table_as_price_and_incast_as_bound() -> None:
    profile, node = load_profile("generic-roofline"), load_node("aws-p6-b300")
    links = Links(node.scale_up_bytes_per_s, 0.0, node.scale_out_bytes_per_s, 0.0, 8, adapter="efa-v4")
    size = 56.0 * 2**20
    for nodes, busbw in ((2, 104.9), (4, 94.0), (32, 54.7)):
        time, evidence = all_to_all_price(size, 8 * nodes, nodes, links, profile)
        ranks = 8 * nodes
        assert size * (ranks - 1) / ranks / time.nic_s / 1e9 == pytest.approx(busbw, rel=0.01)
        assert time.residual > 2.0 and "nccl.all_to_all.nic_call_time.efa-v4" in evidence.entries
    infiniband, _ = all_to_all_price(size, 16, 2, Links(9e11, 0.0, 1e11, 0.0, 8), profile)
    assert infiniband.nic_s == pytest.approx(size / 2 / 0.8e11)


def scenario(*changes: str, node: str = "aws-p6-b300") -> Scenario:
    fields = {
        "model": "qwen3-235b-a22b",
        "cluster": {"node": node, "nodes": 8},
        "parallel": {"tp": 8, "pp": 4, "ep": 16, "sequence_parallel": True},
        "schedule": "1f1b",
        "batch": {"sequences": 64, "sequence_length": 4096},
        "precision": "bf16",
    }
    return load_scenario(fields, list(changes))


def test_polling_threads_slow_the_launches_in_proportion_to_the_cores_that_they_hold() -> None:
    def share(kernels: str, node: str = "aws-p6-b300") -> float:
        return polled_share(Pricer(resolve(scenario(f"communication.kernels={kernels}", node=node))))

    assert share("uccl-ep") == pytest.approx(32 / 96) and share("deepep-2025-04") == pytest.approx(8 / 96)
    assert share("nccl") == share("deepep-2025-04", "hgx-b300") == 0.0 < BESIDE_POLLING


def test_dispatchers_run_over_the_adapters_that_somebody_measured_and_nccl_is_the_default() -> None:
    none = "software.framework=none"
    assert scenario(none).communication.kernels == "nccl"
    assert scenario(none, node="hgx-b300").communication.kernels == "deepep-2025-02"
    for kernels, node in (("hybridep", "aws-p6-b300"), ("deepep-2025-02", "aws-p5"), ("uccl-ep", "hgx-b300")):
        job = resolve(scenario(f"communication.kernels={kernels}", node=node))
        with pytest.raises(InputError, match="nobody published it over") as raised:
            check_dispatcher(job.scenario, job.cluster, job.layout)
        assert raised.value.nearest and kernels not in raised.value.nearest


def test_adapters_join_their_own_networks_alone() -> None:
    with pytest.raises(InputError, match=r"joins efa-v4 NICs.*aws-p6-b300"):
        scenario("cluster.network=efa-v4-400g", node="hgx-b300")
    with pytest.raises(InputError, match=r"has NICs of kind efa-v2.*efa-v2-100g"):
        scenario("cluster.network=mrft-ib-400g", node="aws-p5")
