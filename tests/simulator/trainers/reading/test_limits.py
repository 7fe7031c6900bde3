"""Hostile launch files end at a limit of work, size or depth, with a message and without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers import reading
from moesim.simulator.trainers.reading import read_launch


def refusal(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        read_launch(file)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("plan.toml", ".".join(["a"] * 990) + " = 1\n", "more than 40 parts"),
        ("plan.toml", "[training]\nsteps = 0x" + "f" * 3600, "line 2: training.steps: a whole number"),
        ("plan.toml", "[training]\nsteps = [0x" + "f" * 3600 + "]", "a whole number of 14,400 bits"),
        ("plan.json", '{"a": ' + "[" * 900 + "]" * 900 + "}", "40 levels"),
        ("plan.json", '{"a": ' * 900 + "1" + "}" * 900, "40 levels"),
        ("plan.yaml", "a: 0x" + "f" * 3600, "0xfff"),
    ],
)
def test_a_configuration_ends_at_a_limit(tmp_path: Path, name: str, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, name, text)


def test_what_no_limit_foresees_is_a_message_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("unhashable type: 'list'")

    monkeypatch.setattr(reading, "chosen_launch", broken)
    assert "run.sh: cannot be read: TypeError" in refusal(tmp_path, "run.sh", "python train.py --x 1\n")


def test_the_work_of_pointing_entries_is_bounded(tmp_path: Path) -> None:
    text = "a0: ''\n" + "".join(f"a{n}: '{f'${{a{n - 1}}}' * 900}'\n" for n in range(1, 9))
    (tmp_path / "a.yaml").write_text(text)
    assert {one.value for one in read_launch(tmp_path / "a.yaml").arguments} == {""}
