"""Calls compiled code from its object files, without Numba, whose import takes longer than a prediction.

`compile_to` has Numba compile the functions that Python calls, each with all that it calls, and writes their
machine code down; `native` has LLVM place it in memory. The functions take and return only numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, byref, c_double, c_int32, c_int64, c_void_p
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from moesim.simulator.engine.compiled.cache import (
    FUNCTIONS,
    SYMBOLS,
    cache_folder,
    forget,
    is_ready,
    mark_used,
)

Call: TypeAlias = Callable[..., int]


class CannotCompileError(RuntimeError):
    """Numba cannot be imported or cannot compile here, or its code cannot be loaded; the text is why."""


class NativeCode(NamedTuple):
    """The compiled functions that Python calls: those of `loop` and of `phases`."""

    start: Call
    advance: Call
    fill_rows: Call
    fill_payloads: Call
    fill_noise: Call


MODULES = {
    **dict.fromkeys(("start", "advance"), "loop"),
    **dict.fromkeys(("fill_rows", "fill_payloads", "fill_noise"), "phases"),
}
"""The module of each function."""
assert NativeCode._fields == FUNCTIONS


@cache
def native() -> NativeCode:
    """The compiled functions: from the cache's files, or where it has none compiled by this process.

    Raises CannotCompileError; a cache that cannot be loaded then counts as incomplete.
    """
    folder = cache_folder()
    if folder is None or not is_ready(folder):
        return _in_memory()
    try:
        return _from_files(folder)
    except (ImportError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        forget(folder)
        raise CannotCompileError(f"compiled code in {folder} could not be loaded: {error}") from error


def compile_to(folder: Path) -> None:
    """Compile the functions that Python calls, write their machine code into a folder and load it once.

    Code that LLVM crashes at ends this process before anybody relies on it. Raises CannotCompileError.
    """
    symbols = {}
    try:
        for name in NativeCode._fields:
            function, kinds = _strictly(_source(name)), _kinds(name)
            function.compile(_types(kinds))
            (compiled,) = function.overloads.values()
            (folder / f"{name}.o").write_bytes(compiled.library._get_compiled_object())
            symbols[name] = compiled.fndesc.llvm_func_name, kinds
        (folder / SYMBOLS).write_text(json.dumps(symbols), encoding="utf-8")
        _from_files(folder)
    except Exception as error:
        raise CannotCompileError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """One line for people on why nothing was compiled."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the cache'}: {error.strerror}"
    text = (str(error).strip().splitlines() or [""])[0][:200]
    what = "Numba cannot be imported" if isinstance(error, ImportError) else "Numba could not compile"
    return f"{what} ({type(error).__name__}: {text})"


def _in_memory() -> NativeCode:
    try:
        functions = [_source(name) for name in NativeCode._fields]
        for name, function in zip(NativeCode._fields, functions, strict=True):
            function.compile(_types(_kinds(name)))
    except Exception as error:
        raise CannotCompileError(_reason(error)) from error
    return NativeCode(*functions)


def _source(name: str) -> Any:
    """A function as Numba sees it."""
    package = __name__.rpartition(".")[0]
    return getattr(import_module(f"{package}.{MODULES[name]}"), name)


def _strictly(function: Any) -> Any:
    """The function for callers that are not Python: its code then depends on nothing outside itself."""
    import numba

    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(error_model="numpy", fastmath=False, **options)(function.py_func)


def _kinds(name: str) -> list[str]:
    """The kind of each argument, "int" or "float"."""
    annotations: dict[str, str] = _source(name).py_func.__annotations__
    return [kind for argument, kind in annotations.items() if argument != "return"]


def _types(kinds: Sequence[str]) -> tuple[Any, ...]:
    from numba import types

    return tuple({"int": types.int64, "float": types.float64}[kind] for kind in kinds)


def _from_files(folder: Path) -> NativeCode:
    import llvmlite.binding as llvm

    mark_used(folder)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    symbols = json.loads((folder / SYMBOLS).read_text(encoding="utf-8"))
    return NativeCode(*(_placed(llvm, folder / f"{name}.o", *symbols[name]) for name in NativeCode._fields))


def _placed(llvm: Any, file: Path, symbol: str, kinds: Sequence[str]) -> Call:
    """The function of an object file, in memory."""
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(file.read_bytes()))
    engine.finalize_object()
    numbers: dict[str, Any] = {"int": c_int64, "float": c_double}
    # Numba's calling convention: a status; places for the result and for an error; the arguments.
    prototype = CFUNCTYPE(c_int32, c_void_p, c_void_p, *(numbers[kind] for kind in kinds))
    address = engine.get_function_address(symbol)
    if address == 0:
        raise RuntimeError(f"{file}: it has no function {symbol}; remove its folder, to compile it again")
    function = prototype(address)

    def call(*arguments: float, _engine: Any = engine) -> int:  # the engine owns the memory of the code
        result, error = c_int64(), c_void_p()
        if function(byref(result), byref(error), *arguments) != 0:
            raise RuntimeError(f"the compiled function {symbol} failed")
        return result.value

    return call
