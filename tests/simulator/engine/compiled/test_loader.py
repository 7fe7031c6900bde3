"""The file of compiled code, and what happens where it cannot be used."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.engine import compiled
from moesim.simulator.engine.compiled import engine, loader
from moesim.simulator.engine.compiled.engine import AutomaticEngine, CompiledEngine
from moesim.simulator.engine.compiled.loader import CannotCompileError
from moesim.simulator.engine.registry import engine_of, engine_report
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario

COMPILED = loader._compiled
CODE = '{"start": []}'
"""What compiling gives, as short as it can be."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of compiled code in a folder of its own, where compiling writes little."""
    monkeypatch.setenv(loader.FOLDER, str(tmp_path / "code"))
    loader.place.cache_clear()
    found, why = loader.place()
    assert found is not None, why

    monkeypatch.setattr(loader, "_compiled", lambda: CODE)
    monkeypatch.setattr(loader, "numba_version", lambda: "1")
    yield found
    loader.place.cache_clear()


def harmed(file: Path, text: str) -> None:
    file.write_bytes(file.read_bytes() + text.encode())


def cut(file: Path, text: str) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def junk(file: Path, text: str) -> None:
    file.write_bytes(b"\xff" * 100)


def of_another_version(file: Path, text: str) -> None:
    file.write_text(loader._with_checksum(file.with_name("0" * 24), CODE))


def missing(file: Path, text: str) -> None:
    file.unlink()


@pytest.mark.parametrize("harm", [harmed, cut, junk, of_another_version, missing])
def test_a_file_that_does_not_hold_what_it_should_is_made_again(
    file: Path, harm: Callable[[Path, str], None]
) -> None:
    assert not loader.is_ready()
    assert loader.warm() and loader.is_ready()
    harm(file, "evil")
    assert not loader.is_ready()
    assert loader.warm() and loader.is_ready() and loader._content() == CODE
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".code", ".lock"]


def test_code_that_nobody_used_for_a_month_is_removed(file: Path) -> None:
    old, used, foreign = (file.with_name(f"{name}.code") for name in ("0" * 24, "1" * 24, "somebody's own"))
    for other in (old, used, foreign):
        other.touch()
        os.utime(other, (0.0, 0.0))
    os.utime(used)
    assert loader.warm()
    assert {path for path in file.parent.iterdir() if path.suffix == ".code"} == {file, used, foreign}


HOLDER = """
import sys, time
from pathlib import Path
from moesim.hwmodels.files import locked
with locked(Path(sys.argv[1])) as file:
    file.write(b"17\\n")
    file.flush()
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that compiles and does not come to an end."""
    command = [sys.executable, "-P", "-c", HOLDER, str(file.with_suffix(".lock"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_one_process_compiles_at_a_time_and_a_killed_one_holds_nothing_up(
    file: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    assert not loader.warm() and loader.attempts(file)[:2] == (True, ["17"]) and loader.problem() is None
    assert engine_report()["compiled code"] == f"{file}: process 17 compiles now"
    engine.start_in_background()
    assert not started
    old_s = time.time() - 20 * 60.0
    os.utime(file.with_suffix(".lock"), (old_s, old_s))
    assert "process 17 has been compiling for 20 minutes" in (loader.problem() or "")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not loader.attempts(file)[0] and loader.problem() is None
    engine.start_in_background()
    assert len(started) == 1
    assert loader.warm() and loader.is_ready()


def test_processes_that_are_killed_again_and_again_are_told(file: Path) -> None:
    lock = file.with_suffix(".lock")
    lock.write_text("4\n5\n6\n")
    assert "3 processes that compiled were killed, as where memory runs out" in (loader.problem() or "")
    day_ago_s = time.time() - 1.1 * loader.DAY_S
    os.utime(lock, (day_ago_s, day_ago_s))
    assert loader.problem() is None and loader.warm()
    assert lock.read_bytes() == b""


def test_a_reason_not_to_compile_is_kept_for_a_day(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(loader, "_compiled", full)
    with pytest.raises(CannotCompileError, match=r"No space left on device: .*\.code"):
        loader.warm()
    assert "No space left on device" in (loader.problem() or "")
    day_ago_s = time.time() - 1.1 * loader.DAY_S
    os.utime(file.with_suffix(".lock"), (day_ago_s, day_ago_s))
    assert loader.problem() is None


def test_code_that_cannot_be_loaded_is_made_again(file: Path) -> None:
    """A whole file of this version, whose functions are none."""
    assert loader.warm()
    loader.native.cache_clear()
    with pytest.raises(CannotCompileError, match="could not be loaded"):
        loader.native()
    assert not loader.is_ready()
    loader.native.cache_clear()


def test_a_version_of_what_makes_the_code_changes_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "version", lambda name: "0.0.0" if name == "numpy" else version(name))
    loader.place.cache_clear()
    assert loader.place()[0] != file


@pytest.fixture
def umask_002() -> Iterator[None]:
    """Of a machine where every user has a group of his own."""
    mask = os.umask(0o002)
    yield
    os.umask(mask)


def test_the_folder_is_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask_002: None
) -> None:
    monkeypatch.delenv(loader.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    loader.place.cache_clear()
    file, why = loader.place()
    assert file is not None, why
    for made in (file.parent, file.parent.parent, file.parent.parent.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    file.parent.chmod(0o775)  # as an earlier version left it
    loader.place.cache_clear()
    assert loader.place()[0] == file and file.parent.stat().st_mode & 0o777 == 0o700
    loader.place.cache_clear()


def test_a_named_folder_of_several_users_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    monkeypatch.setenv(loader.FOLDER, str(shared))
    loader.place.cache_clear()
    folder, why = loader.place()
    assert folder is None and f"others may write to {shared}" in why and "0700" in why
    assert shared.stat().st_mode & 0o777 == 0o775, "what a user named is left as it is"
    loader.place.cache_clear()


def test_without_a_folder_nothing_is_warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(loader.FOLDER, str(tmp_path / "file"))  # a file cannot hold a folder
    loader.place.cache_clear()
    assert loader.place()[0] is None and not loader.is_ready()
    loader.place.cache_clear()


@pytest.fixture
def no_numba(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation with Numba's metadata and without its modules."""
    monkeypatch.undo()
    monkeypatch.setenv(loader.FOLDER, str(file.parent))
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    loader.numba_version.cache_clear()
    loader.place.cache_clear()
    engine._load.cache_clear()
    engine._say.cache_clear()
    yield
    loader.numba_version.cache_clear()


def test_without_numba_simpy_runs_and_one_line_says_so(
    small: Scenario, no_numba: None, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = prepare(small).programs
    reference = engine_of("simpy")
    own = CompiledEngine(reference)
    runs = [own.execute(programs) for _ in range(2)]
    assert runs[0][0].end_ns == runs[1][0].end_ns == reference.execute(programs)[0].end_ns
    assert capsys.readouterr().err.count("Numba and llvmlite are not installed") == 1
    assert "simpy, because the compiled one cannot run: Numba" in engine_report()["engine"]


def test_a_numba_that_cannot_be_imported_is_told_and_simpy_runs(
    small: Scenario, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise ImportError("Numba needs NumPy 2.3 or less. Got NumPy 9.9.")

    monkeypatch.setattr(loader, "_compiled", COMPILED)
    monkeypatch.setattr(compiled, "loop", Broken(), raising=False)
    engine._load.cache_clear()
    engine._say.cache_clear()
    programs = prepare(small).programs
    CompiledEngine(engine_of("simpy")).execute(programs)
    assert "Numba cannot be imported (ImportError: Numba needs NumPy 2.3" in capsys.readouterr().err
    assert "NumPy 9.9" in engine_report()["compiled code"]


def test_a_permanent_fallback_is_one_line_a_day(
    small: Scenario, no_numba: None, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = prepare(small).programs

    def lines() -> int:
        auto = AutomaticEngine(CompiledEngine(engine_of("simpy")), engine_of("simpy"))
        auto.tasks = engine.TASKS_BEFORE
        engine._say.cache_clear()
        auto.execute(programs)
        return len(
            re.findall("^moesim: predictions run on the slower SimPy.*doctor", capsys.readouterr().err, re.M)
        )

    assert [lines(), lines()] == [1, 0]
    file = loader.place()[0]
    assert file is not None
    stamp = file.with_name("said")
    day_ago_s = time.time() - 1.1 * loader.DAY_S
    os.utime(stamp, (day_ago_s, day_ago_s))
    assert [lines(), lines()] == [1, 0]
    stamp.unlink()
    stamp.symlink_to(stamp.with_name("elsewhere"))  # nothing is written through a link
    os.utime(stamp, (day_ago_s, day_ago_s), follow_symlinks=False)
    assert [lines(), lines()] == [1, 1] and not stamp.exists()


def test_a_folder_that_cannot_hold_code_is_told_once_a_day_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    monkeypatch.setenv(loader.FOLDER, str(shared))
    loader.place.cache_clear()
    assert loader.place()[0] is None, "others may write to it"
    assert [engine.first_today(), engine.first_today()] == [True, False]
    loader.place.cache_clear()


@pytest.mark.parametrize(
    ("name", "engine_line"),
    [
        ("auto", "simpy, until the code of the compiled one is ready"),
        ("simpy", "simpy, because of MOESIM_ENGINE=simpy"),
        ("compiled", "compiled, because of MOESIM_ENGINE=compiled"),
        ("compield", "none: MOESIM_ENGINE: engine='compield' is not known"),
    ],
)
def test_the_report_says_which_engine_runs_and_why(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, engine_line: str
) -> None:
    monkeypatch.setenv("MOESIM_ENGINE", name)
    report = engine_report()
    assert report["engine"].startswith(engine_line)
    assert report["compiled code"].startswith(f"{file}: empty; ")
    assert loader.warm()
    assert engine_report()["compiled code"] == f"{file}: ready"
    if name == "auto":
        assert engine_report()["engine"].startswith("compiled, after the first 6,000 tasks")


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
    monkeypatch.setattr(engine, "problem", lambda: None)
    auto = AutomaticEngine(compiled, reference)  # type: ignore[arg-type]
    auto.execute(programs)
    assert (compiled.runs, reference.runs, started) == (0, 1, [])  # too little to load anything
    auto.tasks = engine.TASKS_BEFORE
    monkeypatch.setattr(engine, "is_ready", lambda: False)
    auto.execute(programs)
    auto.execute(programs)
    assert (compiled.runs, reference.runs, started) == (0, 3, [1])  # cold: one process compiles
    monkeypatch.setattr(engine, "is_ready", lambda: True)
    auto.execute(programs)
    assert (compiled.runs, reference.runs) == (1, 3)


def test_an_unknown_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESIM_ENGINE", "compield")
    with pytest.raises(
        InputError, match=r"engine='compield' is not known.*did you mean.*compiled|known: simpy"
    ):
        engine_of()
