"""How compiled code reads and writes the arrays of a run: `run.field[index]`, without passing arrays around.

A run is one integer, the address of a table with the address of every array. Numba passes an array as seven
values and counts its references, so functions over a hundred arrays take minutes to compile; over one integer
they take seconds. This module teaches Numba the three types behind it: the run, and vectors of integers and
of floating-point numbers that are no more than an address. `Tables` and `RunState` own all memory.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    register_model,
)

from moesim.simulator.engine.compiled.addresses import FIELDS, FLOATS
from moesim.simulator.engine.compiled.state import SIZES

Run = Any
"""In compiled code: the sizes in `SIZES` as numbers, the fields of `Tables` and `RunState` as vectors."""
Vector = Any
"""In compiled code: a vector of which only the address is known."""


class RunType(types.Type):
    """The address of the table of addresses."""

    def __init__(self) -> None:
        """One type for all runs."""
        super().__init__(name="Run")


class VectorType(types.Type):
    """The address of a vector of numbers."""

    def __init__(self, element: Any) -> None:
        """`element`: int64, float64 or float32."""
        super().__init__(name=f"Vector({element})")
        self.element = element


RUN, INTS, REALS = RunType(), VectorType(types.int64), VectorType(types.float64)
_LLVM = {types.int64: ir.IntType(64), types.float64: ir.DoubleType(), types.float32: ir.FloatType()}


@register_model(RunType)
@register_model(VectorType)
class AddressModel(models.PrimitiveModel):
    """An address is a 64-bit integer."""

    def __init__(self, manager: Any, kind: Any) -> None:
        """`manager`, `kind`: as numba passes them; both types of address are 64-bit integers."""
        super().__init__(manager, kind, ir.IntType(64))


def _place(builder: Any, address: Any, index: Any, element: Any) -> Any:
    pointer = builder.inttoptr(address, ir.PointerType(element))
    return builder.gep(pointer, [index], inbounds=True, source_etype=element)


def _load(builder: Any, address: Any, index: Any, element: Any) -> Any:
    return builder.load(_place(builder, address, index, element), typ=element)


@infer_getattr
class _Fields(AttributeTemplate):
    key = RunType

    def generic_resolve(self, typ: Any, attr: str) -> Any:  # type: ignore[override]
        if attr in SIZES:
            return types.int64
        return (REALS if attr in FLOATS else INTS) if attr in FIELDS else None


@lower_getattr_generic(RunType)  # type: ignore[untyped-decorator]
def _field(context: Any, builder: Any, kind: Any, run: Any, name: str) -> Any:
    number = ir.IntType(64)
    place = FIELDS.index("sizes" if name in SIZES else name)
    address = _load(builder, run, ir.Constant(number, place), number)
    return (
        _load(builder, address, ir.Constant(number, SIZES.index(name)), number) if name in SIZES else address
    )


@infer_global(operator.getitem)
class _Read(AbstractTemplate):
    def generic(self, arguments: Any, keywords: Any) -> Any:
        vector, index = arguments
        if isinstance(vector, VectorType) and isinstance(index, types.Integer):
            return signature(vector.element, vector, types.int64)
        return None


@infer_global(operator.setitem)
class _Write(AbstractTemplate):
    def generic(self, arguments: Any, keywords: Any) -> Any:
        vector, index, _ = arguments
        if isinstance(vector, VectorType) and isinstance(index, types.Integer):
            return signature(types.none, vector, types.int64, vector.element)
        return None


@lower_builtin(operator.getitem, VectorType, types.Integer)  # type: ignore[untyped-decorator]
def _read(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return _load(builder, arguments[0], arguments[1], _LLVM[sig.args[0].element])


@lower_builtin(operator.setitem, VectorType, types.Integer, types.Any)  # type: ignore[untyped-decorator]
def _write(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    address, index, value = arguments
    builder.store(value, _place(builder, address, index, _LLVM[sig.args[0].element]))
    return context.get_dummy_value()


def _typed(result: Any) -> Any:
    def address_as(_: Any, address: Any) -> Any:
        return result(types.int64), lambda context, builder, sig, arguments: arguments[0]

    return intrinsic(address_as)


as_run = _typed(RUN)
"""The run behind the address of its table."""
ints_at = _typed(INTS)
"""The vector of integers at an address."""
floats_at = _typed(REALS)
"""The vector of floating-point numbers at an address."""
singles_at = _typed(VectorType(types.float32))
"""The vector of 32-bit floating-point numbers at an address."""


def _row_of(_: Any, vector: Any, row: Any, width: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        address, row, width = arguments
        offset = builder.mul(builder.mul(row, width), ir.Constant(ir.IntType(64), 8))
        return builder.add(address, offset)

    return vector(vector, types.int64, types.int64), generate


row_of: Any = intrinsic(_row_of)
"""`row_of(vector, row, width)`: a row of a vector whose rows have `width` numbers."""


def _prefetch(_: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        number, byte = ir.IntType(32), ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        read, often, data = (ir.Constant(number, n) for n in (0, 3, 1))
        builder.call(function, [builder.inttoptr(arguments[0], byte), read, often, data])
        return context.get_dummy_value()

    return types.none(vector), generate


prefetch: Any = intrinsic(_prefetch)
"""`prefetch(vector)`: ask the processor to fetch the first 64 bytes of a vector, which are read soon."""
