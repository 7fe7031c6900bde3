"""Lines of commands: no wider than the terminal, broken between words, no escape codes where unwanted."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.cli import main
from moesim.cli.console import (
    chosen_numbers,
    note,
    print_pairs,
    print_table,
    print_text,
    table_lines,
    wrapped,
)
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.summary_text import short

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]
SMALL = str(ROOT / "tests" / "golden" / "scenario-small.yaml")
WIDTH = 80

SPACE = """tp: 1
pp: [2, 4]
ep: 8
cp: 1
microbatch: 1
schedule: [1f1b, zbv]
recompute: full
precision: bf16
sms: 20
zero_stage: 1
"""

COMMANDS = [
    ("simulate", SMALL),
    ("simulate", SMALL, "--uncertainty"),
    ("simulate", SMALL, "--resolution", "full", "--set", "faults=[{kind: slow-gpu, gpu: 1, speed: 0.5}]"),
    ("run", SMALL),
    ("compare", SMALL, "--with", "communication.sms=8;seed=1", "--with", "seed=2", "--with", "seed=3"),
    ("sweep", SMALL, "--vary", "communication.sms=0,20", "--vary", "seed=0,1", "--workers", "1"),
    ("schedule", "dualpipe", "--pp", "8", "--microbatches", "20"),
    ("topology",),
    ("topology", "deepseek-h800-2048"),
    ("models",),
    ("hardware", "h800-sxm"),
    ("presets",),
    ("doctor",),
    ("plan", SMALL, "--space", "space.yaml", "--top", "1", "--workers", "1"),
    ("eplb", "counts.csv", "--ranks", "4", "--redundant", "4", "--top-k", "2"),
]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_line_is_wider_than_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "counts.csv").write_text("8,2,1,1,1,1,1,1\n2,2,2,2,2,2,2,2\n")
    wide = run(*command)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    shown = run(*command)
    assert shown.code == wide.code == 0 and shown.out, shown.err
    assert max(map(len, shown.out.splitlines())) <= WIDTH
    if "doctor" not in command:  # a number is whole wherever it stands
        numbers = re.compile(r"(?<![\w.,-])[-+]?\d[\d,]*(?:\.\d+)?(?![\w-])")
        assert set(numbers.findall(wide.out)) <= set(numbers.findall(shown.out))


def test_words_wrap_below_the_text_and_numbers_keep_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert wrapped("memory      66.9 of 80.0 GiB on the 80.0 GiB of it") == [
        "memory      66.9 of 80.0 GiB on the",
        "            80.0 GiB of it",
    ]
    assert wrapped("  a sentence that is longer than this page is wide") == [
        "  a sentence that is longer than this",
        "    page is wide",
    ]
    path = "/a/" + "long/" * 20 + "name"
    assert wrapped(f"see {path}")[1].strip() == path  # a path can be copied


def test_a_table_folds_its_words_below_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    headers = ("plan", "step (s)", "why", "cost")
    rows = [("first", "1,234.5", "words " * 9, "$12,345,678"), ("other", "2", "", "")]
    assert table_lines(headers, rows, right=(1, 3)) == [
        "plan   step (s)         cost",
        "first   1,234.5  $12,345,678",
        "    why: words words words words words",
        "      words words words words",
        "other         2",
    ]
    monkeypatch.setenv("COLUMNS", "200")
    assert table_lines(headers, rows, right=(1, 3))[1].split()[:2] == ["first", "1,234.5"]
    assert len(table_lines(headers, rows, right=(1, 3))) == 3


def test_a_long_name_breaks_after_its_dots_and_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "profile-2048.attention_forward-h200.long_suffix"
    lines = table_lines(("entry", "error"), [(name, "5.0 %"), ("short", "12.5 %")], right=(1,))
    assert max(map(len, lines)) <= 40 and "2048" in lines[1] and lines[1].endswith(" 5.0 %")
    first = "".join(line.split()[0] for line in lines[1:-1])
    assert first == name and lines[-1].split() == ["short", "12.5", "%"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_colour", [True, False])
def test_no_color_leaves_no_escape_code(monkeypatch: pytest.MonkeyPatch, no_colour: bool) -> None:
    out, err = _Terminal(), _Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    print_table(("name", "GPUs"), [("home", "2,048")], right=(1,))
    print_pairs({"GPUs": "2,048"})
    print_text("2,048 GPUs, 18.909 s")
    note("18.909 s")
    shown = out.getvalue() + err.getvalue()
    assert ("\x1b[" in shown) is not no_colour  # headers are bold where colours are welcome
    assert shown.count("2,048") == 3, "a number is one piece: nothing is highlighted inside it"


def test_control_characters_of_a_file_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("name\x1b[2J\rx")
    print_table(("name",), [("a\x1b[2J",)])
    assert "\x1b" not in capsys.readouterr().out


def test_the_width_is_that_of_the_terminal() -> None:
    """A command on a terminal of 60 columns, without COLUMNS."""
    leader, follower = pty.openpty()
    subprocess.run(["stty", "cols", "60"], stdin=follower, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    code = "from moesim.cli.console import print_text; print_text('word ' * 40)"
    subprocess.run([sys.executable, "-c", code], stdout=follower, env=environment, check=True, timeout=60)
    os.close(follower)
    shown = os.read(leader, 10_000).decode()
    os.close(leader)
    assert 50 < max(map(len, shown.splitlines())) <= 60


# -- output ------------------------------------------------------------------------------------------


SMALL_SCENARIO = Path(__file__).parents[1] / "golden" / "scenario-small.yaml"


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
        "software={framework: none, kernels: eager, parameters_copied: true, allocator: expandable}",
    ]  # fmt: skip
    code, out, err = run("simulate", str(SMALL_SCENARIO), *(word for key in fsdp2 for word in ("--set", key)))
    assert code == 0, err
    peaks = re.search(r"([0-9.]+) active and ([0-9.]+) reserved at the peaks of PyTorch's allocator", out)
    assert peaks is not None and 0.0 < float(peaks[1]) < float(peaks[2]) < 141.0
