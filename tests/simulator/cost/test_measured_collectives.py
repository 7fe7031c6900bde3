"""Imported curves of collectives: each is read where its operation is priced, or said to be read nowhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import moesim
from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.kernels.importers import merge, nccl_tests_profile
from moesim.simulator.cost.library_collectives import (
    RingOperation,
    all_to_all_price,
    measured_seconds,
    ring_price,
    ring_seconds,
    use_of,
)
from moesim.simulator.dispatchers.protocol import Links
from moesim.simulator.predict.provenance import imported_readings
from moesim.simulator.predict.step import prepare

Run = Callable[..., Any]
H200 = Links(450e9, 3.33e-6, 50e9, 3.7e-6, 8)
BASE = load_profile("h200-8gpu")
SIZES = tuple(2**k for k in range(20, 31, 2))
PROGRAMS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
            "all_to_all": "alltoall"}  # fmt: skip


def log(program: str, gb_per_s: float, nodes: int = 1, gpus: int = 8) -> dict[str, Any]:
    """The JSON of nccl-tests for a collective whose algorithm bandwidth is the same at every size."""
    devices = [
        {"rank": rank, "hostname": f"h{rank // (gpus // nodes)}", "device_info": "NVIDIA H200"}
        for rank in range(gpus)
    ]
    times = [{"time": size / gb_per_s / 1e3, "nwrong": 0} for size in SIZES]
    return {
        "args": [f"./build/{program}_perf"],
        "nccl_version": 22807,
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": [
            {"size": size, "out_of_place": time, "in_place": time}
            for size, time in zip(SIZES, times, strict=True)
        ],
    }


def imported(
    folder: Path, program: str, gb_per_s: float, nodes: int = 1, gpus: int = 8
) -> CalibrationProfile:
    path = folder / f"{program}.json"
    path.write_text(json.dumps(log(program, gb_per_s, nodes, gpus)))
    nic = 50e9 if nodes > 1 else None
    return merge(BASE, nccl_tests_profile(path, nic_bytes_per_s=nic), name="mine")


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_ring_takes_as_long_as_the_imported_curve_says(tmp_path: Path, operation: RingOperation) -> None:
    profile = imported(tmp_path, PROGRAMS[operation], 123.0)
    total = 2.0**27
    price = ring_price(operation, total, 8, 8, H200, profile)
    assert price.seconds == pytest.approx(total / 123e9, rel=1e-4), "size over the algorithm bandwidth"
    assert price.evidence.entries == {f"nccl.{operation}.busbw.8-ranks-1-node"}
    assert price.evidence.notes == frozenset()


def test_an_all_to_all_takes_as_long_as_the_imported_curve_says(tmp_path: Path) -> None:
    profile = imported(tmp_path, "alltoall", 99.0)
    time, evidence = all_to_all_price(2.0**26, 8, 1, H200, profile)
    assert time.scale_up_s == pytest.approx(2.0**26 / 99e9, rel=1e-4) and time.nic_s == 0.0
    assert evidence.entries == {"nccl.all_to_all.busbw.8-ranks-1-node"}


def test_a_group_over_nodes_is_priced_only_by_its_own_curve(tmp_path: Path) -> None:
    profile = imported(tmp_path, "all_reduce", 20.0, nodes=4, gpus=32)
    total = 2.0**28
    assert ring_seconds(total, 32, 8, H200, profile, "all_reduce") == pytest.approx(total / 20e9, rel=1e-4)
    for ranks, per_node in ((64, 8), (32, 4), (8, 8)):
        plain = ring_seconds(total, ranks, per_node, H200, BASE, "all_reduce")
        assert ring_seconds(total, ranks, per_node, H200, profile, "all_reduce") == plain
    spread = imported(tmp_path, "alltoall", 15.0, nodes=4, gpus=32)
    time, _ = all_to_all_price(2.0**28, 32, 4, H200, spread)
    assert time.nic_s == pytest.approx(2.0**28 / 15e9, rel=1e-4) and time.scale_up_s == 0.0


def test_another_group_of_the_node_has_equal_bus_bandwidth_and_a_note(tmp_path: Path) -> None:
    profile = imported(tmp_path, "all_reduce", 100.0)
    bus = 100e9 * 2 * 7 / 8
    price = ring_price("all_reduce", 2.0**25, 4, 4, H200, profile)
    assert price.seconds == pytest.approx(2.0**25 * 2 * 3 / 4 / bus, rel=1e-4)
    assert any(
        "measured over 8 GPUs of a node, used for groups of 4" in note for note in price.evidence.notes
    )


def test_below_the_smallest_measured_size_its_time_is_held(tmp_path: Path) -> None:
    profile = imported(tmp_path, "all_reduce", 100.0)
    times = [measured_seconds(profile, "all_reduce", size, 8, 1) for size in (1.0, 2.0**10, 2.0**20, 2.0**31)]
    seconds = [time.seconds for time in times if time is not None]
    assert seconds[0] == seconds[1] == pytest.approx(2.0**20 / 100e9, rel=1e-4)
    assert seconds[3] == pytest.approx(2.0**31 / 100e9, rel=1e-4)
    assert [bool(time.evidence.notes) for time in times if time is not None] == [True, True, False, True]


def test_without_an_import_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    one = ring_seconds(1e9, 64, 8, H200, BASE)
    assert ring_seconds(1e9, 64, 8, H200, BASE, "all_reduce") == 2.0 * one
    assert ring_seconds(1e9, 64, 8, H200, BASE, "reduce_scatter") == one


NODE = ("cluster.nodes=1", "cluster.network=single-node", "profile=mine.yaml", "precision=bf16")
PLAN = (*NODE, "parallel={ep: 8, zero_stage: 1}", "communication.kernels=nccl", "schedule=1f1b",
        "recompute=full", "batch.sequences=64")  # fmt: skip
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "mixtral-on-h200.yaml")
SCENARIO = (EXAMPLE, *(word for key in PLAN for word in ("--set", key)))


def test_a_faster_import_makes_the_step_faster_and_explain_shows_what_it_replaced(
    run: Run, tmp_path: Path
) -> None:
    steps, operation = [], "all_to_all"
    for rate in (20.0, 400.0):
        (tmp_path / "log.json").write_text(json.dumps(log(PROGRAMS[operation], rate)))
        made = run("import", "nccl-tests", "log.json", "--into", "h200-8gpu", "-o", "mine.yaml", "--force")
        assert made.code == 0 and f"nccl.{operation}.busbw.8-ranks-1-node is read by {operation}" in made.out
        shown = run("simulate", *SCENARIO, "--json")
        result = json.loads(shown.out)
        steps.append(result["step"]["time_s"])
        assert any(
            row["path"] == f"profile.nccl.{operation}.busbw.8-ranks-1-node" for row in result["provenance"]
        )
        assert not any("imported curves" in text for text in result["warnings"])
    assert steps[1] < 0.95 * steps[0]
    told = run("explain", *SCENARIO).out
    rows = told.partition("imported curves: what they replaced")[2].splitlines()
    row = next(line for line in rows if line.startswith(f"nccl.{operation}.busbw"))
    assert f"{400 * 7 / 8:.4g} GB/s" in row and "nccl-tests" in row


def test_an_import_that_nothing_reads_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps(log("broadcast", 100.0)))
    made = run("import", "nccl-tests", "log.json", "--into", "h200-8gpu", "-o", "mine.yaml")
    assert made.code == 0 and "no price reads nccl.broadcast.busbw.8-ranks-1-node" in made.err
    shown = run("simulate", *SCENARIO, "--json")
    (warning,) = [text for text in json.loads(shown.out)["warnings"] if "imported curves" in text]
    assert "nccl.broadcast.busbw.8-ranks-1-node (no price reads such a curve)" in warning


def test_an_import_that_this_plan_does_not_read_is_said(tmp_path: Path) -> None:
    profile = imported(tmp_path, "all_reduce", 100.0)
    five = moesim.load(EXAMPLE)
    result = moesim.simulate(five.replace(profile=profile, software={"framework": "none"}))
    assert any("read by all_reduce inside a node: tensor parallelism without" in w for w in result.warnings)


def test_an_overlaid_curve_shows_the_old_value_and_its_profile(tmp_path: Path) -> None:
    profile = imported(tmp_path, "all_gather", 200.0)
    example = moesim.load(EXAMPLE)
    prepared = prepare(example.replace(profile=profile, precision="bf16"))
    readings = {reading.entry: reading for reading in imported_readings(prepared)}
    share = readings["collective.scale_up_fraction"]
    old = max(y for _, y in BASE.curve("collective.scale_up_fraction").curve.points)
    assert share.new == pytest.approx(200 * 7 / 8 / 450, rel=1e-3)
    assert share.old is not None and share.old <= old
    assert share.replaced.startswith("collective.scale_up_fraction of h200-8gpu (moesim calibrate")


def test_curves_of_an_older_import_are_said_to_be_unread() -> None:
    entry = BASE.curve("nccl.all_to_all.busbw")
    older = entry.model_copy(update={"id": "nccl.alltoall.busbw", "source": "nccl-tests alltoall_perf: x"})
    assert use_of(older) is None


# -- All-reduces that switches add up: published rates, rings where they are faster,  -----------

PROFILE = load_profile("h800-trace")
SWITCHED = Links(450e9, 3.33e-6, 50e9, 5e-6, 8, in_network="scale-up", architecture="Hopper")
NEWER = replace(SWITCHED, scale_up_bytes_per_s=900e9, architecture="Blackwell")
GIB = 2.0**30


def all_reduce_s(size: float, ranks: int, per_node: int, links: Links) -> float:
    return ring_seconds(size, ranks, per_node, links, PROFILE, "all_reduce")


@pytest.mark.parametrize(
    ("links", "ranks", "busbw"),
    [(SWITCHED, 8, 473.1), (SWITCHED, 6, 435.6), (NEWER, 8, 838.0), (NEWER, 6, 778.2)],
)
def test_large_all_reduces_reach_the_published_rates(links: Links, ranks: int, busbw: float) -> None:
    """stas00/ml-engineering, all-reduce of 8 GiB by NVLS."""
    algorithm = 8 * GIB / all_reduce_s(8 * GIB, ranks, ranks, links)
    assert algorithm * 2 * (ranks - 1) / ranks == pytest.approx(busbw * 1e9, rel=0.03)


def test_rings_stay_where_they_are_faster_and_where_nothing_adds_up() -> None:
    rings = replace(SWITCHED, in_network="none")
    small = 64 * 1024.0
    assert all_reduce_s(small, 8, 8, SWITCHED) == all_reduce_s(small, 8, 8, rings)
    assert all_reduce_s(8 * GIB, 8, 8, replace(SWITCHED, architecture="Ampere")) == all_reduce_s(
        8 * GIB, 8, 8, rings
    )
    assert all_reduce_s(GIB, 32, 8, SWITCHED) == all_reduce_s(GIB, 32, 8, rings)


def test_switches_of_the_network_halve_what_a_nic_sends() -> None:
    everywhere = replace(SWITCHED, in_network="all")
    switched, rings = (all_reduce_s(8 * GIB, 32, 8, links) for links in (everywhere, SWITCHED))
    assert 8 * GIB / switched == pytest.approx(248e9, rel=0.01)
    assert switched < rings


def test_switches_that_cannot_add_up_are_refused() -> None:
    home = "deepseek-v3-2048xh800"
    with pytest.raises(InputError) as caught:
        moesim.check(
            home, "cluster=mi300x-2048", "profile=generic-roofline", "communication.in_network=scale-up"
        )
    assert (caught.value.key, caught.value.nearest) == ("communication.in_network", ("none",))
    assert load_cluster("deepseek-h800-2048").accelerator.architecture == "Hopper"
    moesim.check(home, "communication.in_network=all")


@pytest.mark.parametrize(("hidden", "top_k", "us"), [(2880, 1, 68.2), (5120, 8, 622.6), (2048, 6, 205.5)])
def test_two_h100_exchange_rows_of_widths_that_were_left_out_of_the_curve(
    hidden: int, top_k: int, us: float
) -> None:
    """Measured with 4,096 tokens of BF16 (lab/results/2026-11-26-h100-x2-widths.json.xz)."""
    links, profile = Links(450e9, 1e-6, 50e9, 1e-6, 8), load_profile("h100-products")
    time, evidence = all_to_all_price(4096.0 * top_k * hidden * 2, 2, 1, links, profile)
    assert time.scale_up_s * 1e6 == pytest.approx(us, rel=0.06)
    assert evidence.entries == {"nccl.all_to_all.busbw.2-ranks-1-nodes"}
