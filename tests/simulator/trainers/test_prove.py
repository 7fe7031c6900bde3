"""`make proof TREES=...` names scripts that are there, and says what is missing instead of failing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prove import PROOF, ROOT, main, readers

PAGE = (ROOT / "docs" / "trainers.md").read_text("utf-8")


def test_every_reader_has_its_script_its_verdicts_and_its_place_on_the_page(tmp_path: Path) -> None:
    for reader in readers(tmp_path, tmp_path / "exports"):
        scripts = [word for word in reader.command if word.endswith(".py")]
        assert len(scripts) == 1 and Path(scripts[0]).is_file()
        for path in reader.needs:
            assert f"`{path.relative_to(tmp_path).parts[0]}" in PAGE, path
    words = [Path(word) for reader in readers(tmp_path, tmp_path) for word in reader.command]
    assert {word for word in words if word.parent == PROOF} == set(PROOF.glob("trainers-*.json"))


def test_what_is_missing_is_said_and_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "megatron-0.14").mkdir()
    assert main(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(": skipped; " in line for line in lines)
    assert "judge/bin/python" in lines[0] and "megatron-0.20" in lines[0]
    assert "megatron-0.14" not in lines[0]


def test_a_reader_that_fails_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "judge" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for version in ("0.20", "0.14"):
        (tmp_path / f"megatron-{version}").mkdir()
    command = (sys.executable, "-c", "raise SystemExit(1)")
    first = readers(tmp_path, tmp_path)[0]
    assert first.missing == ()
    monkeypatch.setattr("prove.readers", lambda *_: (type(first)(first.title, command, first.needs),))
    assert main(tmp_path) == 1
