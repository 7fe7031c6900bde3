"""Keeps the machine code of the compiled engine in one file, and loads it without Numba.

Numba, whose import takes longer than a prediction, compiles the functions that Python calls once (in the
background, or `python -P -m moesim.simulator.engine.compiled.loader`); LLVM places them in memory. Who
writes machine code decides what its process does: its folder is private, and it counts only if it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from ctypes import CFUNCTYPE, byref, c_double, c_int32, c_int64, c_void_p
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from moesim.hwmodels.files import locked, private_folder

FOLDER, NAME = "MOESIM_COMPILED", "moesim-compiled"
"""Environment variable that names another folder for compiled code, and the name of the usual one."""
MOST_ATTEMPTS = 3
"""Attempts that ended without a word, as when memory runs out, after which the next one waits for a day."""
DAY_S = 86_400.0
HANGS_S, UNUSED_S = 900.0, 30 * DAY_S
"""Seconds after which a process that compiles is said to hang, and after which code that nobody uses goes."""
_ENGINE = Path(__file__).parent.parent
SOURCES = (*sorted((_ENGINE / "compiled").glob("*.py")), _ENGINE / "maxmin.py", _ENGINE / "program.py")


Call: TypeAlias = Callable[..., int]


class NativeCode(NamedTuple):
    """The compiled functions of `loop` and `serving` that Python calls; they take and return only numbers."""

    start: Call
    advance: Call
    end_times: Call
    fill_rows: Call
    fill_figures: Call
    serve: Call


class CannotCompileError(RuntimeError):
    """Numba cannot be imported or cannot compile here, or its code cannot be loaded; the text is why."""


@cache
def numba_version() -> str | None:
    """Version of Numba; None where it or LLVM's binding is not installed, or only its metadata is there."""
    with suppress(ValueError, ImportError):  # a module that was put in its place has no description
        return version("numba") if all(find_spec(name) for name in ("numba", "llvmlite")) else None
    return None


@cache
def place() -> tuple[Path | None, str]:
    """(file of this version's code, ""), or (None, why code can be kept nowhere and what helps)."""
    folder, why = private_folder(FOLDER, NAME)
    return (folder / f"{_key()}.code" if folder else None), why


def _key() -> str:
    """Hash of the sources, of Python, of the packages that make the code, and of the processor."""
    packages = numba_version() and [version(name) for name in ("numba", "llvmlite", "numpy")]
    processor = platform.processor()
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        lines = file.read(4096).splitlines()
        processor = "".join(line for line in lines if line.startswith(("model name", "CPU part", "flags")))
    digest = hashlib.sha256(repr((sys.version, packages, platform.machine(), processor)).encode())
    digest.update(b"".join(source.read_bytes() for source in SOURCES))
    return digest.hexdigest()[:16]


def _content() -> str | None:
    """The code of this version as JSON; None where its file is missing, cut, changed or of another one."""
    file = place()[0]
    with suppress(OSError, ValueError):
        text = file.read_text(encoding="ascii") if file else ""
        content = text.partition("\n")[2]
        return content if file and text == _with_checksum(file, content) else None
    return None


def _with_checksum(file: Path, content: str) -> str:
    return f"{hashlib.sha256((file.stem + content).encode()).hexdigest()}\n{content}"


def is_ready() -> bool:
    """Whether the code of this version is there and whole."""
    return _content() is not None


def _write(file: Path, content: str) -> None:
    """Write the code in one step, and remove that of other versions that nobody has used for a month."""
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(_with_checksum(file, content), encoding="ascii")
    temporary.replace(file)
    for other in file.parent.glob(f"{'[0-9a-f]' * 24}.*"):
        with suppress(OSError):
            if other.stem != file.stem and time.time() - other.stat().st_mtime > UNUSED_S:
                other.unlink()


@cache
def native() -> NativeCode:
    """The compiled functions, from the file or made now. Removes a bad file. Raises CannotCompileError."""
    file, content = place()[0], _content()
    if file is None or content is None:
        return _loaded(_compiled())
    try:
        os.utime(file)
        return _loaded(content)
    except Exception as error:
        with suppress(OSError):
            file.unlink()
        raise CannotCompileError(f"compiled code in {file} could not be loaded: {error}") from error


def _compiled() -> str:
    """Compile the functions that Python calls, each with all that it calls: symbol, kinds and code as JSON.

    Without wrappers for Python their code depends on nothing outside itself. It is loaded once, so code that
    LLVM crashes at ends this process before anybody relies on it.
    """
    try:
        import numba

        from moesim.simulator.engine.compiled import loop, serving

        found = {}
        options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        for name in NativeCode._fields:
            source = getattr(serving if name == "serve" else loop, name).py_func
            kinds = [kind for argument, kind in source.__annotations__.items() if argument != "return"]
            function = numba.njit(error_model="numpy", fastmath=False, **options)(source)
            function.compile(tuple(getattr(numba.types, f"{kind}64") for kind in kinds))
            (made,) = function.overloads.values()
            code = b64encode(made.library._get_compiled_object()).decode()
            found[name] = made.fndesc.llvm_func_name, kinds, code
        content = json.dumps(found)
        _loaded(content)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0][:200]
        what = "Numba cannot be imported" if isinstance(error, ImportError) else "Numba could not compile"
        raise CannotCompileError(f"{what} ({type(error).__name__}: {text})") from error
    return content


def _loaded(content: str) -> NativeCode:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return NativeCode(**{name: _placed(llvm, *entry) for name, entry in json.loads(content).items()})


def _placed(llvm: Any, symbol: str, kinds: list[str], code: str) -> Call:
    """A function in memory, called as Numba does: a status; places for result and error; the arguments."""
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(b64decode(code)))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    if address == 0:
        raise RuntimeError(f"it has no function {symbol}")
    numbers = [c_double if kind == "float" else c_int64 for kind in kinds]
    function = CFUNCTYPE(c_int32, c_void_p, c_void_p, *numbers)(address)

    def call(*arguments: float, _engine: Any = engine) -> int:  # the engine owns the memory of the code
        result, error = c_int64(), c_void_p()
        if function(byref(result), byref(error), *arguments) != 0:
            raise RuntimeError(f"the compiled function {symbol} failed")
        return result.value

    return call


def warm() -> bool:
    """Compile the event loop into the file unless it is there; return whether it is ready.

    One process compiles at a time; another one returns at once. The locked file has a line for each process
    that did not end by itself, or says why the last one failed. Raises CannotCompileError.
    """
    file, failure = place()[0], ""
    if file is None or numba_version() is None or is_ready():
        return is_ready()
    try:
        with locked(file.with_suffix(".lock")) as lock:
            if lock is None or is_ready():  # another process compiles, or has done so meanwhile
                return is_ready()
            lock.write(f"{os.getpid()}\n".encode())
            lock.flush()
            try:
                _write(file, _compiled())
            except (OSError, CannotCompileError) as error:
                failure = f"{error}\n"
            lock.truncate(0)
            lock.write(failure.encode())
    except OSError as error:
        failure = str(error)
    if failure:
        raise CannotCompileError(failure.strip())
    return True


def attempts(file: Path) -> tuple[bool, list[str], float]:
    """Whether a process compiles; what its file says (see `warm`); seconds since then. Raises OSError."""
    path = file.with_suffix(".lock")
    with locked(path) as lock:
        held = lock is None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return held, lines, time.time() - path.stat().st_mtime


def problem() -> str | None:
    """Why predictions stay on SimPy until somebody helps, in words for people; None where they do not."""
    file, why = place()
    if numba_version() is None:
        return "Numba and llvmlite are not installed, or cannot be imported (pip install 'numba>=0.61')"
    if file is None or is_ready():
        return why or None
    try:
        held, lines, age_s = attempts(file)
    except OSError as error:
        return str(error)
    last = lines[-1] if lines else ""
    if held and age_s > HANGS_S:
        return f"process {last} has been compiling for {age_s / 60:.0f} minutes: end it"
    if not held and age_s < DAY_S and lines and (not last.isdigit() or len(lines) >= MOST_ATTEMPTS):
        killed = f"{len(lines)} processes that compiled were killed, as where memory runs out"
        return f"{killed if last.isdigit() else last[:400]}; tried again after a day"
    return None


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)
    try:
        sys.exit(0 if warm() else 1)
    except CannotCompileError as failed:
        sys.exit(f"moesim: {failed}")
