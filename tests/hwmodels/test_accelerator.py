from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels import (
    Accelerator,
    InputError,
    describe,
    hardware_rows,
    list_accelerators,
    list_clusters,
    list_prices,
    load_accelerator,
    load_cluster,
    load_energy_site,
    load_failure_rate,
    load_node,
    load_prices,
)
from moesim.hwmodels.yaml_io import dump_mapping

VENDORS = {
    "NVIDIA": 13, "AMD": 5, "Google": 5, "Huawei": 3, "Apple": 3, "Moore Threads": 2, "Intel": 2, "AWS": 2,
}  # fmt: skip
DEDICATED = ("tpu", "ascend", "trainium", "gaudi")


def test_accelerators_of_eight_vendors_are_there() -> None:
    vendors = [load_accelerator(name).vendor for name in list_accelerators()]
    assert {vendor: vendors.count(vendor) for vendor in set(vendors)} == VENDORS


def test_collectives_take_compute_units_on_gpus_only() -> None:
    for name in list_accelerators():
        chip = load_accelerator(name)
        assert (chip.communication_engine is not None) == name.startswith(DEDICATED), name
        assert (chip.unit_name == "SM") == (chip.vendor == "NVIDIA")
    assert load_accelerator("mi300x").n_sms == 304
    with pytest.raises(InputError, match=r"'a100-sxm' has no peak\.fp8; precisions that it has are bf16"):
        load_accelerator("a100-sxm").peak_flop_per_s("fp8")
    with pytest.raises(InputError, match="'mtt-s4000' has no figure compute_units"):
        _ = load_accelerator("mtt-s4000").n_sms


def test_h800_figures_of_the_home_case() -> None:
    h800 = load_accelerator("h800-sxm")
    assert h800.n_sms == 132
    assert h800.peak_flop_per_s("bf16") == 989e12
    assert h800.peak_flop_per_s("fp8") == 1979e12
    assert h800.hbm_bytes == 80 * 2**30
    assert h800.hbm_bandwidth_achievable is not None and h800.hbm_bandwidth_achievable.value == 3000e9
    assert h800.scale_up_bytes_per_s == 200e9
    assert h800.scale_up_achievable_bytes_per_s == 160e9


@pytest.mark.parametrize("name", list_accelerators())
def test_figures_are_consistent(name: str) -> None:
    chip = load_accelerator(name)
    assert chip.name == name
    assert chip.vendor == "NVIDIA" or chip.unit_name != "SM"
    if chip.hbm_bandwidth_achievable is not None:
        assert chip.hbm_bandwidth_achievable.value < chip.hbm_bytes_per_s
    if chip.scale_up_bandwidth_achievable is not None:
        assert chip.scale_up_achievable_bytes_per_s < chip.scale_up_bytes_per_s
    if {"fp32", "bf16"} <= chip.peak.keys():
        assert chip.peak_flop_per_s("fp32") < chip.peak_flop_per_s("bf16")
    for dtype in chip.gemm_achievable:
        ratio = chip.gemm_achievable_flop_per_s(dtype) / chip.peak_flop_per_s(dtype)
        assert (0.4 < ratio < 1.0) or (name, dtype) == ("gaudi2", "bf16")
    assert chip.clock is None or 1e9 < chip.clock_hz < 3e9
    assert chip.tdp is None or 300 <= chip.tdp_w <= 1500
    # Ridge point: a plausible machine does tens to hundreds of operations a byte.
    assert 20 < max(p.value for p in chip.peak.values()) / chip.hbm_bytes_per_s < 4000
    assert Accelerator.model_validate_json(chip.model_dump_json()) == chip


def test_a_file_of_the_user(tmp_path: Path) -> None:
    chip = load_accelerator("h800-sxm").model_dump(mode="json", exclude_none=True)
    chip |= {"name": "mine", "hbm_bandwidth": "4 TB/s", "tdp": None}
    path = tmp_path / "mine.yaml"
    path.write_text(dump_mapping(chip))
    mine = load_accelerator(str(path))
    assert mine.hbm_bytes_per_s == 4e12
    assert mine.hbm_bandwidth.source == f"stated in {path}"
    with pytest.raises(InputError, match="'mine' has no figure tdp"):
        _ = mine.tdp_w
    node = load_node("hgx-h800").model_dump(mode="json", exclude_none=True) | {"accelerator": "mine.yaml"}
    (tmp_path / "node.yaml").write_text(dump_mapping(node))
    assert load_node(str(tmp_path / "node.yaml")).accelerator == mine


def test_prices_energy_and_failures() -> None:
    assert set(list_prices()) < set(list_accelerators())
    for name in list_prices():
        offers = load_prices(name).offers
        assert [offer.value for offer in offers] == sorted(offer.value for offer in offers)
    assert load_prices("h800-sxm").offers[0].value == 2.0
    assert load_energy_site("china").pue.value == 1.56
    llama = load_failure_rate("llama3-16k-h100")
    # 419 unexpected interruptions in 54 days on 2,048 nodes: one in 3.09 h.
    assert llama.mean_time_between_s(2048) / 3600 == pytest.approx(54 * 24 / 419, rel=0.01)


def test_hardware_names_are_unique_and_describable() -> None:
    rows = [row for row in hardware_rows() if row.what != "prices"]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert all(row.summary for row in hardware_rows())
    for name in names:
        assert all(figure.source and figure.value for figure in describe(name))
    with pytest.raises(InputError, match=r"unknown hardware 'h801-sxm' \(nearest: 'h800-sxm'\)"):
        describe("h801-sxm")


def test_description_of_a_chip_names_its_engine_and_what_is_missing() -> None:
    h800 = {row.path: row.value for row in describe("h800-sxm")}
    assert (h800["peak.bf16"], h800["hbm"], h800["offers.0"]) == ("989 TFLOP/s", "80 GiB", "$2/h")
    rows = {row.path: row for row in describe("tpu-v5p")}
    assert rows["communication_engine"].value == "ICI remote DMA"
    assert rows["tdp"] == ("tdp", "not found", "missing", "no public source was found", "", "")
    listed = {row.name: row for row in hardware_rows() if row.what == "accelerator"}
    assert listed["tpu-v5p"].missing == "tdp, clock, l2, price"
    assert listed["tpu-v5p"].confidence == "peak-only (generic-roofline)"
    assert listed["h800-sxm"].confidence == "measured (h800-trace)"
    assert listed["h800-sxm"].missing == ""


@pytest.mark.parametrize("name", list_clusters())
def test_every_cluster_loads_with_an_energy_site_and_a_dated_price_where_there_is_one(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.energy is not None
    chip = cluster.accelerator.name
    if chip not in list_prices():
        assert cluster.price_per_gpu_hour is None
        return
    price = cluster.price_per_gpu_hour
    assert price is not None and cluster.usd_per_gpu_hour > 0
    assert price.kind == "derived" or price.value in [offer.value for offer in load_prices(chip).offers]
