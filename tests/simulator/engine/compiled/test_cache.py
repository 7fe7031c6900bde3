"""The folder of compiled code, and what happens where it cannot be used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.compiled import cache, engine, native, warm
from moesim.simulator.engine.compiled.engine import AutomaticEngine, CompiledEngine
from moesim.simulator.engine.compiled.native import CannotCompileError
from moesim.simulator.engine.registry import engine_of, engine_report
from moesim.simulator.predict.compile import prepare
from moesim.simulator.scenario import Scenario

OBJECT = b"\x7fELF\x02" + bytes(35) + (64).to_bytes(8, sys.byteorder) + bytes(16)
"""The head of an object file, which ends where its table of no sections begins."""


def written(place: Path) -> None:
    """What compiling leaves, as short as it can be."""
    for name in cache.FUNCTIONS:
        (place / f"{name}.o").write_bytes(OBJECT)
    (place / cache.SYMBOLS).write_text("{}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of compiled code of its own, where compiling writes small files."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "code"))
    cache.place.cache_clear()
    found = cache.cache_folder()
    assert found is not None

    monkeypatch.setattr(warm, "compile_to", lambda place: written(place))
    monkeypatch.setattr(warm, "numba_version", lambda: "1")
    yield found
    cache.place.cache_clear()


def test_a_damaged_file_is_noticed_and_made_again(folder: Path) -> None:
    assert not cache.is_ready(folder)
    assert warm.warm() and cache.is_ready(folder)
    code = folder / "advance.o"
    code.write_bytes(b"evil")
    assert not cache.is_ready(folder)
    assert warm.warm() and code.read_bytes() == OBJECT
    (folder / "more.o").write_bytes(b"unknown")
    assert not cache.is_ready(folder)


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    folder.chmod(0o770)
    cache.place.cache_clear()
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


HOLDER = """
import sys, time
from pathlib import Path
from moesim.simulator.engine.compiled import warm
with warm._locked(Path(sys.argv[1])) as file:
    file.write(b"17\\n")
    file.flush()
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that compiles and does not come to an end."""
    command = [sys.executable, "-P", "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_one_process_compiles_at_a_time_and_a_killed_one_holds_nothing_up(
    folder: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    assert not warm.warm() and warm.compiling() == "17" and warm.problem() is None
    warm.start_in_background()
    assert not started
    old_s = time.time() - 20 * 60.0
    os.utime(folder / warm.LOCK, (old_s, old_s))
    assert "process 17 has been compiling for 20 minutes" in (warm.problem() or "")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert warm.compiling() is None and warm.problem() is None
    warm.start_in_background()
    assert len(started) == 1
    assert warm.warm() and cache.is_ready(folder)


def test_processes_that_are_killed_again_and_again_are_told(folder: Path) -> None:
    (folder / warm.LOCK).write_text("4\n5\n6\n")
    assert "3 processes that compiled were ended before they were done" in (warm.problem() or "")
    day_ago_s = time.time() - 1.1 * cache.DAY_S
    os.utime(folder / warm.LOCK, (day_ago_s, day_ago_s))
    assert warm.problem() is None and warm.warm()
    assert (folder / warm.LOCK).read_bytes() == b""


def test_a_reason_not_to_compile_is_kept_for_a_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(place: Path) -> None:
        raise OSError(28, "No space left on device", str(place / "start.o"))

    monkeypatch.setattr(warm, "compile_to", full)
    with pytest.raises(CannotCompileError, match=r"start\.o: No space left on device"):
        warm.warm()
    assert "No space left on device" in (warm.problem() or "")
    day_ago_s = time.time() - 1.1 * cache.DAY_S
    os.utime(folder / warm.FAILED, (day_ago_s, day_ago_s))
    assert warm.problem() is None


def damaged_list(folder: Path) -> None:
    (folder / cache.READY).write_text("[" * 100_000)


def one_object_less(folder: Path) -> None:
    (folder / "start.o").unlink()
    agree(folder)


def a_cut_object(folder: Path) -> None:
    (folder / "start.o").write_bytes(OBJECT[:40])
    agree(folder)


def no_object(folder: Path) -> None:
    (folder / "start.o").write_bytes(b"junk" * 100)
    agree(folder)


def files_of_another_version(folder: Path) -> None:
    agree(folder, "0" * cache.KEY_CHARACTERS)


def agree(folder: Path, key: str | None = None) -> None:
    """Make list and checksums those of the files that are there, whatever they are."""
    files = sorted([*folder.glob("*.o"), folder / cache.SYMBOLS])
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / cache.READY).write_text(json.dumps({"key": key or folder.name, "files": sums}))


@pytest.mark.parametrize(
    "harm", [damaged_list, one_object_less, a_cut_object, no_object, files_of_another_version]
)
def test_a_cache_that_does_not_hold_what_it_should_is_made_again(
    folder: Path, harm: Callable[[Path], None]
) -> None:
    assert warm.warm()
    agree(folder)
    assert cache.is_ready(folder)
    harm(folder)
    assert not cache.is_ready(folder)
    assert warm.warm() and cache.is_ready(folder)


def test_code_that_cannot_be_loaded_is_made_again(folder: Path) -> None:
    """Whole objects with the right checksums, whose list of functions does not name them."""
    assert warm.warm()
    native.native.cache_clear()
    with pytest.raises(CannotCompileError, match="could not be loaded"):
        native.native()
    assert not cache.is_ready(folder)
    native.native.cache_clear()


@pytest.mark.parametrize("package", ["numba", "llvmlite", "numpy"])
def test_a_version_of_what_makes_the_code_changes_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    before = cache._version
    monkeypatch.setattr(cache, "_version", lambda name: "0.0.0" if name == package else before(name))
    cache.numba_version.cache_clear()
    cache.place.cache_clear()
    assert cache.cache_folder() != folder
    cache.numba_version.cache_clear()


@pytest.fixture
def umask_002() -> Iterator[None]:
    """Of a machine where every user has a group of his own."""
    mask = os.umask(0o002)
    yield
    os.umask(mask)


def test_the_folder_is_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask_002: None
) -> None:
    monkeypatch.delenv(cache.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    cache.place.cache_clear()
    folder = cache.cache_folder()
    assert folder is not None, cache.place()[1]
    for made in (folder, folder.parent, folder.parent.parent, folder.parent.parent.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o775)  # as an earlier version left it
    cache.place.cache_clear()
    assert cache.cache_folder() == folder and folder.parent.stat().st_mode & 0o777 == 0o700
    cache.place.cache_clear()


def test_a_named_folder_of_several_users_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    monkeypatch.setenv(cache.FOLDER, str(shared))
    cache.place.cache_clear()
    folder, why = cache.place()
    assert folder is None and f"others may write to {shared}" in why and "0700" in why
    assert shared.stat().st_mode & 0o777 == 0o775, "what a user named is left as it is"
    cache.place.cache_clear()


def test_without_a_folder_nothing_is_warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file"))  # a file cannot hold a folder
    cache.place.cache_clear()
    assert cache.cache_folder() is None and not cache.is_ready(None)
    cache.place.cache_clear()


@pytest.fixture
def no_numba(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with Numba's metadata and without its modules."""
    monkeypatch.setattr(cache, "find_spec", lambda name: None)
    monkeypatch.setattr(warm, "numba_version", cache.numba_version)
    for cached in (cache.numba_version, cache.place, warm.warm_once, engine._say):
        cached.cache_clear()


def test_metadata_alone_is_no_numba(no_numba: None) -> None:
    assert cache._version("numba") is not None and cache.numba_version() is None
    cache.numba_version.cache_clear()


def test_without_numba_simpy_runs_and_one_line_says_so(
    small: Scenario, no_numba: None, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = prepare(small).programs
    reference = engine_of("simpy")
    compiled = CompiledEngine(reference)
    runs = [compiled.execute(programs) for _ in range(2)]
    assert runs[0][0].end_ns == runs[1][0].end_ns == reference.execute(programs)[0].end_ns
    assert capsys.readouterr().err.count("Numba and llvmlite are not installed") == 1
    assert "simpy, because the compiled one cannot run: Numba" in engine_report()["engine"]
    cache.numba_version.cache_clear()


def test_a_numba_that_cannot_be_imported_is_told_and_simpy_runs(
    small: Scenario, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> object:
        raise ImportError("Numba needs NumPy 2.3 or less. Got NumPy 9.9.")

    monkeypatch.setattr(native, "_source", broken)
    monkeypatch.setattr(warm, "compile_to", native.compile_to)
    warm.warm_once.cache_clear()
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
    stamp = cache._base() / cache.SAID
    day_ago_s = time.time() - 1.1 * cache.DAY_S
    os.utime(stamp, (day_ago_s, day_ago_s))
    assert [lines(), lines()] == [1, 0]
    stamp.unlink()
    stamp.symlink_to(stamp.with_name("elsewhere"))  # nothing is written through a link
    os.utime(stamp, (day_ago_s, day_ago_s), follow_symlinks=False)
    assert [lines(), lines()] == [1, 1] and not stamp.exists()
    cache.numba_version.cache_clear()


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
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, engine_line: str
) -> None:
    monkeypatch.setenv("MOESIM_ENGINE", name)
    report = engine_report()
    assert report["engine"].startswith(engine_line)
    assert report["compiled code"].startswith(f"{folder}: empty; ")
    assert warm.warm()
    assert engine_report()["compiled code"] == f"{folder}: ready"
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
