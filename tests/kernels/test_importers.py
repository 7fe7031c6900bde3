from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.kernels.export import profile_text, write_profile
from moesim.kernels.importers import (
    CALIBRATION_IMPORTERS,
    CalibrationImporter,
    deepep_profile,
    merge,
    nccl_tests_profile,
)
from moesim.kernels.importers.common import NIC, ImportOption
from moesim.kernels.importers.deepep import parse as parse_deepep
from moesim.kernels.importers.nccl_tests import bus_factor, parse_json, parse_text

SECRET = "AWS_SECRET_ACCESS_KEY=hunter2"
HOST = "gpu-node-17.internal"
TIMES_US = {8 << 20: 64.0, 32 << 20: 140.0, 128 << 20: 397.0, 512 << 20: 1506.0, 2048 << 20: 5461.0}


def nccl_json(**changes: Any) -> dict[str, Any]:
    def result(size: int, us: float) -> dict[str, Any]:
        body = {"time": us, "nwrong": 0.0}
        return {"size": size, "out_of_place": body, "in_place": {**body, "time": us * 1.02, "nwrong": None}}

    device = {"rank": 0, "pid": 4711, "hostname": HOST, "device": 0, "device_info": "NVIDIA H200"}
    return {
        "version": 2,
        "start_time": "2026-11-20 12:00:00",
        "args": ["./build/all_gather_perf", "-g", "8", "-J", "out.json"],
        "env": ["PATH=/usr/bin", SECRET],
        "nccl_version": 22807,
        "config": {"nthreads": 1, "ngpus": 8, "parallel_init": "false", "devices": [device]},
        "results": [result(size, us) for size, us in TIMES_US.items()],
        **changes,
    }


FIXTURES = Path(__file__).parent / "importer_fixtures"
"""Made by hand from the documented formats."""
NCCL_TEXT = (FIXTURES / "all_gather.txt").read_text()
FIRST_INTRANODE = (FIXTURES / "deepep_first_intranode.txt").read_text()
FIRST_INTERNODE = (FIXTURES / "deepep_first_internode.txt").read_text()
SECOND = (FIXTURES / "deepep_second.txt").read_text()


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- nccl-tests ---


@pytest.mark.parametrize(("name", "content"), [("a.json", nccl_json()), ("a.txt", NCCL_TEXT)])
def test_both_forms_of_nccl_tests_give_the_same_shares(tmp_path: Path, name: str, content: object) -> None:
    profile = nccl_tests_profile(write(tmp_path, name, content))
    share = profile.curve("collective.scale_up_fraction")
    assert profile.accelerator == "h200-sxm"
    # 256 MiB a rank: 7/8 of 2 GiB in 5,461 us (mean with 2 % more in place) over 450 GB/s.
    expected = 7 / 8 * (2048 << 20) / (5461e-6 * 1.01) / 450e9
    assert share.curve.at(256 * 2**20).value == pytest.approx(expected, rel=1e-3)
    assert [p[0] for p in share.points] == [1, 4, 16, 64, 256]
    assert share.interpolation == "log" and share.conditions.note == "NCCL 2.28.7"
    assert profile.curve("nccl.all_gather.busbw.8-ranks-1-node").y_unit == "GB/s"


def test_the_environment_of_a_run_reaches_neither_profile_nor_messages(tmp_path: Path) -> None:
    text = profile_text(nccl_tests_profile(write(tmp_path, "a.json", nccl_json())))
    broken: list[dict[str, Any]] = [{"results": []}, {"args": []}, {"config": {}}, {"results": [{"size": 1}]}]
    for changes in broken:
        with pytest.raises(InputError) as error:
            nccl_tests_profile(write(tmp_path, "a.json", nccl_json(**changes)))
        text += str(error.value)
    for secret in ("hunter2", "AWS_SECRET", "PATH=", HOST, "4711"):
        assert secret not in text


def test_nodes_are_counted_and_need_the_rate_of_the_nic(tmp_path: Path) -> None:
    text = NCCL_TEXT
    for rank in range(4, 8):
        text = text.replace(
            f"Rank {rank:2d} Group  0 Pid   4711 on {HOST}", f"Rank {rank:2d} Group  0 Pid 4711 on h2"
        )
    path = write(tmp_path, "a.txt", text)
    with pytest.raises(InputError, match="state the nominal rate of a GPU's NIC"):
        nccl_tests_profile(path)
    share = nccl_tests_profile(path, nic_bytes_per_s=100e9).curve("collective.nic_fraction")
    assert share.points[0][0] == 2
    assert share.points[0][1] == pytest.approx(344.08 / 1.01 / 4 / 100, rel=1e-2)


def test_bus_factors_and_ranks_of_the_documentation() -> None:
    operations = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast")
    assert [bus_factor(name, 8) for name in operations] == [1.75, 0.875, 0.875, 0.875, 1]
    data = nccl_json()
    data["config"] = {"nthreads": 1, "ngpus": 1, "devices": data["config"]["devices"] * 8}
    assert parse_json(json.dumps(data), "a.json").ranks == 8  # processes times GPUs


def test_columns_are_found_by_their_header() -> None:
    """-I 1 puts four more columns behind each block."""
    lines = []
    for line in NCCL_TEXT.splitlines():
        cells = line.split()
        if "#wrong" in cells:
            line = line.replace("#wrong", "#wrong i_min i_max i_p99 i_cv%")
        elif cells[0].isdigit():
            line = " ".join([*cells[:9], "60 90 80 3.0", *cells[9:], "61 91 81 3.1"])
        lines.append(line)
    assert parse_text("\n".join(lines), "a.txt").rows == parse_text(NCCL_TEXT, "a.txt").rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", nccl_json(results={}), "not the JSON of nccl-tests"),
        ("a.json", nccl_json(args=["./mystery"]), "--operation"),
        ("a.json", nccl_json(results=[{"size": 8, "out_of_place": {"time": "nan"}}]), "not a number"),
        ("a.json", nccl_json(results=[{"size": 8, "out_of_place": {"time": -1}}]), "not a measurement"),
        ("a.json", nccl_json(results=[{"size": 8, "out_of_place": {"time": 1, "nwrong": 3}}]), "wrong"),
        ("a.json", nccl_json(results=[{"size": 2**60, "out_of_place": {"time": 1}}]), "nothing to import"),
        ("a.json", nccl_json(results=[{"size": 2**40, "out_of_place": {"time": 1}}]), "to 10 PB/s"),
        ("a.txt", "hello", "no table"),
        ("a.txt", "", "empty"),
        ("a.txt", NCCL_TEXT.replace("NVIDIA H200", "Some Board"), "--accelerator"),
        ("a.txt", NCCL_TEXT.replace("5461.00", "abc"), "not a number"),
        ("a.txt", NCCL_TEXT.replace("  time  ", " cputime  "), "CPU time"),
    ],
)
def test_hostile_nccl_files_are_input_errors(
    tmp_path: Path, name: str, content: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        nccl_tests_profile(write(tmp_path, name, content))


def test_a_missing_file_and_another_accelerator_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        nccl_tests_profile(tmp_path / "no.txt")
    with pytest.raises(InputError, match="--accelerator h200-sxm"):  # a profile is not renamed
        nccl_tests_profile(write(tmp_path, "a.txt", NCCL_TEXT), accelerator="h800-sxm")


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    header = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong\n"
    for parse in (
        lambda: parse_text(header + "8 1 " + text, "a.txt", "all_gather"),
        lambda: parse_json(text, "a.json"),
        lambda: parse_deepep(text, "a.txt", 8),
    ):
        with pytest.raises(InputError):
            parse()


# --- DeepEP ---


def test_first_generation_inside_a_node(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", FIRST_INTRANODE)
    slower = FIRST_INTRANODE.replace("SMs 24", "SMs 8").replace("323.00", "150.0")
    paths = [write(tmp_path, "8.txt", slower), path]
    profile = deepep_profile(paths, accelerator="h200-sxm", ranks=8)  # runs become one curve over SMs
    assert profile.curve("ep.dispatch.sm_rate").points == ((8, 150.0), (24, 323.0))
    share = profile.curve("ep.dispatch.scale_up_fraction").points[1][1]
    assert share == pytest.approx(323 * 7 / 8 / 450, rel=1e-4)
    assert "4,096 tokens" in profile.curve("ep.dispatch.sm_rate").source
    bf16 = deepep_profile([path], accelerator="h200-sxm", ranks=8, dispatch_dtype="BF16")
    assert bf16.curve("ep.dispatch.sm_rate").points == ((24, 333.0),)


def test_first_generation_across_nodes_gives_the_share_of_the_nic_without_local_traffic(
    tmp_path: Path,
) -> None:
    records = parse_deepep(FIRST_INTERNODE, "a.txt", 64)
    assert records[0].seconds == pytest.approx(1450e-6) and records[0].scale_up_bytes_per_s == 95.31e9
    assert records[1].seconds is None and records[1].dtype == ""
    path = write(tmp_path, "a.txt", FIRST_INTERNODE)
    profile = deepep_profile([path], accelerator="h800-sxm", ranks=64, kernels="mine", nic_bytes_per_s=50e9)
    assert profile.dispatchers == ("mine",)
    share = profile.curve("ep.nic_fraction.mine")
    assert share.points[0][0] == 8
    assert share.points[0][1] == pytest.approx(50.5 * 7 / 8 / 50, rel=1e-3)
    with pytest.raises(InputError, match="--nic"):
        deepep_profile([path], accelerator="h800-sxm", ranks=64)
    with pytest.raises(InputError, match="8 a node"):
        deepep_profile([path], accelerator="h800-sxm", ranks=8, nic_bytes_per_s=50e9)
    with pytest.raises(InputError, match="cannot be"):
        deepep_profile([path], accelerator="h800-sxm", ranks=64, nic_bytes_per_s=25e9)


def test_second_generation_takes_the_median_rank_and_ignores_variants(tmp_path: Path) -> None:
    records = parse_deepep(SECOND, "a.txt")
    assert [(r.operation, r.dtype, r.sms, r.ranks) for r in records] == [
        ("dispatch", "FP8", 6, 8),
        ("combine", "", 6, 8),
        ("dispatch", "FP8", 6, 8),
    ]
    profile = deepep_profile([write(tmp_path, "a.txt", SECOND)], accelerator="h200-sxm")
    middle = (160.32 / 0.486 + 160.32 / 0.4845) / 2
    ((sms, rate, *_),) = profile.curve("ep.dispatch.sm_rate").points
    assert sms == 6 and rate == pytest.approx(middle, rel=1e-4)
    left_out = deepep_profile([tmp_path / "a.txt"], accelerator="h200-sxm", local_traffic_counted=False)
    counted, added = (p.curve("ep.combine.sm_rate").points[0][1] for p in (profile, left_out))
    assert added == pytest.approx(counted * 8 / 7, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("nothing here", 8, "no result of DeepEP"),
        (FIRST_INTRANODE, None, "--ranks"),
        (FIRST_INTRANODE.replace("323.00", "1.2.3"), 8, "not a number"),
        (FIRST_INTRANODE.replace("323.00", "0"), 8, "not a measurement"),
        (FIRST_INTRANODE.replace("SMs 24, NVL chunk 12", "SMs 99999, NVL chunk 12"), 8, "cannot be"),
        (FIRST_INTRANODE.replace("323.00", "900.0"), 8, "cannot be|would carry"),
        (SECOND.replace(" > Ranks: 1 x 8\n", ""), None, "whole output"),
        (SECOND.replace("486.000", "0.000"), None, "not a measurement"),
    ],
)
def test_hostile_deepep_output_is_an_input_error(
    tmp_path: Path, text: str, ranks: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        deepep_profile([write(tmp_path, "a.txt", text)], accelerator="h200-sxm", ranks=ranks)


def test_unknown_accelerators_and_missing_formats_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", SECOND.replace("@ EP:   0/8 | combine", "@ EP:   0/8 | reduced combine"))
    with pytest.raises(InputError, match="unknown accelerator"):
        deepep_profile([path], accelerator="h999")
    with pytest.raises(InputError, match="--dispatch-dtype"):
        deepep_profile([path], accelerator="h200-sxm", dispatch_dtype="BF16")
    with pytest.raises(InputError, match="at least one"):
        deepep_profile([], accelerator="h200-sxm")


# --- into a profile of one's own ---


def test_imported_entries_replace_those_of_the_same_id(tmp_path: Path) -> None:
    base = load_profile("h200-measured")
    added = nccl_tests_profile(write(tmp_path, "a.txt", NCCL_TEXT))
    merged = merge(base, added, name="mine")
    share = merged.curve("collective.scale_up_fraction")
    assert share.points == added.curve("collective.scale_up_fraction").points
    assert "replaces the entry from moesim measurement" in (share.note or "")
    assert merged.curve("ep.dispatch.sm_rate.deepep") == base.curve("ep.dispatch.sm_rate.deepep")
    assert {e.id for e in merged.entries()} == {e.id for e in base.entries()} | {
        e.id for e in added.entries()
    }
    assert load_profile(write_profile(merged, tmp_path / "mine.yaml")) == merged
    assert load_profile(write_profile(added, tmp_path / "added.json")) == added


def test_profiles_of_two_accelerators_do_not_merge(tmp_path: Path) -> None:
    added = deepep_profile([write(tmp_path, "a.txt", FIRST_INTRANODE)], accelerator="h200-sxm", ranks=8)
    with pytest.raises(InputError, match="do not stand for another"):
        merge(load_profile("h800-trace"), added)
    with pytest.raises(InputError, match="holds no entry"):
        merge(load_profile("h200-measured"), load_profile("hopper-launch"))


@pytest.mark.parametrize("ranks", [-8, 1, 65_537])
def test_ranks_that_no_group_has(tmp_path: Path, ranks: int) -> None:
    path = write(tmp_path, "a.txt", "[tuning] Best dispatch (FP8): SMs 24, NVL chunk 12, 100.00 GB/s (NVL)")
    with pytest.raises(InputError, match=rf"--ranks {ranks}: an expert-parallel group has 2 to 65,536 ranks"):
        deepep_profile([path], accelerator="h800-sxm", ranks=ranks)


@pytest.mark.parametrize(
    "line",
    [
        "> Ranks: 1 x 0\n> #SM: 8\nEP: 0/0 | dispatch: 1 GB/s (SO), 2 GB/s (SU), 3.0 us, 4 bytes",
        "> Ranks: 9" + "9" * 400 + " x 8",
        "> #SM: " + "9" * 400,
        f"> Ranks: 1 x 8\n> #SM: 8\nEP: 0/8 | dispatch: 1 GB/s (SO), 2 GB/s (SU), {'9' * 400} us, 9 bytes",
    ],
)
def test_hostile_numbers_of_deepep_are_input_errors(tmp_path: Path, line: str) -> None:
    with pytest.raises(InputError, match=r"a\.txt, line"):
        deepep_profile([write(tmp_path, "a.txt", line)], accelerator="h800-sxm")


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", CALIBRATION_IMPORTERS.values(), ids=lambda spec: spec.name)
def test_options_are_parameters_of_the_reader(spec: CalibrationImporter) -> None:
    parameters = inspect.signature(spec.read).parameters
    for option in spec.options:
        default = parameters[option.parameter].default
        assert option.required == (default is inspect.Parameter.empty)
        assert option.required or default == option.default


def test_values_of_options_are_checked_with_their_name() -> None:
    dtype = ImportOption("dispatch_dtype", "", choices=("FP8", "BF16"))
    assert NIC.value("400 Gb/s") == 50e9 and NIC.value(None) is None
    assert dtype.value("FP8") == "FP8"
    for option, text, words in (
        (dtype, "FP4", "--dispatch-dtype FP4: FP8 or BF16 is expected"),
        (NIC, "fast", "--nic: "),
        (NIC, "1e30 GB/s", "--nic: "),
    ):
        with pytest.raises(InputError, match=words):
            option.value(text)
