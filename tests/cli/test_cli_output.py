"""How commands print: numbers for people, progress, errors of ours, readers that stop."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.cli import main
from moesim.cli.console import chosen_numbers
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.summary_text import short

SMALL_SCENARIO = Path(__file__).parents[1] / "golden" / "scenario-small.yaml"

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("text", "numbers"), [("all", None), ("0", [0]), ("0,3-5", [0, 3, 4, 5]), (" 1 , 2 ", [1, 2])]
)
def test_number_lists(text: str, numbers: list[int] | None) -> None:
    assert chosen_numbers("--ranks", text) == numbers


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "1,,2", "9" * 30, "²"])
def test_bad_number_lists(text: str) -> None:
    with pytest.raises(InputError, match="--ranks"):
        chosen_numbers("--ranks", text)


def test_numbers_for_people() -> None:
    assert [short(n) for n in (14.8e12, 2.664e6, 950.4, 12345.0)] == ["14.8 T", "2.66 M", "950", "12,345"]


def test_an_internal_error_is_one_line_and_a_traceback_on_demand(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("moesim.cli.doctor.findings", broken)
    code, out, err = run("doctor")
    assert code == 1 and out == "" and err.count("\n") == 1
    assert "internal error (ZeroDivisionError: of ours)" in err and moesim.__version__ in err
    with pytest.raises(ZeroDivisionError):
        main(["--debug", "doctor"])


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    moesim_command = f'"{sys.executable}" -c "from moesim.cli import main; main()"'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("moesim", moesim_command)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_reader_that_has_enough_is_no_error() -> None:
    done = _shell("moesim hardware --json | head -1")
    assert done.stdout == "[\n" and done.stderr == ""


def test_a_full_disk_is_told() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = _shell("moesim schema scenario > /dev/full")
    assert done.returncode == 1 and done.stderr.startswith("moesim: error: ") and done.stderr.count("\n") == 1


def test_a_report_gives_the_peaks_of_a_replayed_allocator(run: Run) -> None:
    fsdp2 = [
        "model=qwen3-8b", "parallel={zero_stage: 3, microbatch: 1}",
        "batch={sequences: 32, sequence_length: 4096}",
        "precision={linear: bf16, parameters: fp32, loss: fp32}",
        "software={kernels: eager, parameters_copied: true, allocator: expandable}",
    ]  # fmt: skip
    code, out, err = run("simulate", str(SMALL_SCENARIO), *(word for key in fsdp2 for word in ("--set", key)))
    assert code == 0, err
    peaks = re.search(r"([0-9.]+) active and ([0-9.]+) reserved at the peaks of PyTorch's allocator", out)
    assert peaks is not None and 0.0 < float(peaks[1]) < float(peaks[2]) < 141.0
