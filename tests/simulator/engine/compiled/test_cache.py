"""The folder of compiled code, and what happens where it cannot be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.compiled import cache, engine, warm
from moesim.simulator.engine.compiled.engine import AutomaticEngine, CompiledEngine
from moesim.simulator.engine.registry import engine_of
from moesim.simulator.predict.compile import prepare
from moesim.simulator.scenario import Scenario


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of compiled code of its own, where compiling writes one small file."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "code"))
    cache.cache_folder.cache_clear()
    found = cache.cache_folder()
    assert found is not None

    monkeypatch.setattr(warm, "compile_to", lambda place: (place / "advance.o").write_bytes(b"code"))
    monkeypatch.setattr(warm, "numba_version", lambda: "1")
    yield found
    cache.cache_folder.cache_clear()


def test_a_damaged_file_is_noticed_and_made_again(folder: Path) -> None:
    assert not cache.is_ready(folder)
    assert warm.warm() and cache.is_ready(folder)
    code = folder / "advance.o"
    code.write_bytes(b"evil")
    assert not cache.is_ready(folder)
    assert warm.warm() and code.read_bytes() == b"code"
    (folder / "more.o").write_bytes(b"unknown")
    assert not cache.is_ready(folder)


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    folder.chmod(0o770)
    cache.cache_folder.cache_clear()
    assert cache.cache_folder() is None and not warm.warm()


def test_code_that_nobody_used_for_a_month_is_removed(folder: Path) -> None:
    old, used, foreign = (folder.parent / name for name in ("0" * 24, "1" * 24, "somebody's own"))
    for other in (old, used, foreign):
        other.mkdir(mode=0o700)
        (other / "advance.o").touch()
        os.utime(other, (0.0, 0.0))
    cache.mark_used(used)
    assert warm.warm()
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted(
        [folder.name, used.name, foreign.name]
    )


def test_one_process_compiles_at_a_time(folder: Path) -> None:
    (folder / warm.LOCK).touch()
    assert not warm.warm()
    (folder / warm.LOCK).unlink()
    assert warm.warm() and not (folder / warm.LOCK).exists()


def test_without_a_folder_nothing_is_warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file"))  # a file cannot hold a folder
    cache.cache_folder.cache_clear()
    assert cache.cache_folder() is None and not cache.is_ready(None)
    cache.cache_folder.cache_clear()


def test_without_numba_simpy_runs_and_one_line_says_so(
    small: Scenario, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "numba_version", lambda: None)
    engine._say.cache_clear()
    programs = prepare(small).programs
    reference = engine_of("simpy")
    runs = [CompiledEngine(reference).execute(programs) for _ in range(2)]
    assert runs[0][0].end_ns == runs[1][0].end_ns == reference.execute(programs)[0].end_ns
    assert capsys.readouterr().err.count("Numba is not installed") == 1


def test_auto_runs_little_and_cold_jobs_on_simpy(small: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        name = "named"

        def __init__(self) -> None:
            self.runs = 0

        def execute(self, programs: object) -> list[object]:
            self.runs += 1
            return []

    programs = prepare(small).programs
    compiled, reference, started = Named(), Named(), []
    monkeypatch.setattr(engine, "start_in_background", lambda: started.append(1))
    monkeypatch.setattr(engine, "numba_version", lambda: "1")
    auto = AutomaticEngine(compiled, reference)  # type: ignore[arg-type]
    auto.execute(programs)
    assert (compiled.runs, reference.runs, started) == (0, 1, [])  # too little to load anything
    auto.tasks = engine.TASKS_BEFORE
    monkeypatch.setattr(engine, "is_ready", lambda _: False)
    auto.execute(programs)
    auto.execute(programs)
    assert (compiled.runs, reference.runs, started) == (0, 3, [1])  # cold: one process compiles
    monkeypatch.setattr(engine, "is_ready", lambda _: True)
    auto.execute(programs)
    assert (compiled.runs, reference.runs) == (1, 3)


def test_an_unknown_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESIM_ENGINE", "compield")
    with pytest.raises(
        InputError, match=r"engine='compield' is not known.*did you mean.*compiled|known: simpy"
    ):
        engine_of()
