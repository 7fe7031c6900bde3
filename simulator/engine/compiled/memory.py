"""What compiled code is made of: how functions are compiled, how they read and write the arrays of a run
(`run.field[index]`, without passing arrays around), vectors of members' clocks, and the queue of events.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import infer_getattr, intrinsic, lower_builtin, lower_getattr_generic, register_model

from moesim.simulator.engine.compiled.state import (
    COMPUTE,
    ERROR,
    EVENTS,
    NOW,
    QUEUE_FULL,
    SEQUENCE,
    SERVING_LAYOUT,
    SHARDING,
    STEP_LAYOUT,
    TOO_LONG,
    ArrayLayout,
)
from moesim.simulator.engine.program import NS

# -- compiling -------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function with the first one that calls it.

    Division by zero gives infinity, as in NumPy. `fastmath` stays off, so every sum keeps its order.
    """
    result: Callable[P, R] = numba.njit(error_model="numpy", fastmath=False)(function)
    return result


# -- the arrays of a run ---------------------------------------------------------------------------

Run = Any
"""In compiled code: the sizes of a `ArrayLayout` as numbers, its fields as vectors."""
Vector = Any
"""In compiled code: a vector of which only the address is known."""


class RunType(types.Type):
    """The address of the table of addresses."""

    def __init__(self, layout: ArrayLayout) -> None:
        """One type for all runs whose arrays are of a layout."""
        super().__init__(name=f"Run({layout.name})")
        self.layout = layout


class VectorType(types.Type):
    """The address of a vector of numbers."""

    def __init__(self, element: Any) -> None:
        """`element`: int64, int32, float64 or float32."""
        super().__init__(name=f"Vector({element})")
        self.element = element


RUN, SERVING = RunType(STEP_LAYOUT), RunType(SERVING_LAYOUT)
INTS, REALS, SHORTS = VectorType(types.int64), VectorType(types.float64), VectorType(types.int32)
_LLVM = {
    types.int64: ir.IntType(64),
    types.int32: ir.IntType(32),
    types.float64: ir.DoubleType(),
    types.float32: ir.FloatType(),
}


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
        layout = typ.layout
        if attr in layout.sizes:
            return types.int64
        if attr in layout.shorts:
            return SHORTS
        return (REALS if attr in layout.floats else INTS) if attr in layout.fields else None


@lower_getattr_generic(RunType)  # type: ignore[untyped-decorator]
def _field(context: Any, builder: Any, kind: Any, run: Any, name: str) -> Any:
    number = ir.IntType(64)
    sizes, fields = kind.layout.sizes, kind.layout.fields
    place = fields.index("sizes" if name in sizes else name)
    address = _load(builder, run, ir.Constant(number, place), number)
    return (
        _load(builder, address, ir.Constant(number, sizes.index(name)), number) if name in sizes else address
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
        kind = address if isinstance(address, VectorType) else types.int64
        return result(kind), lambda context, builder, sig, arguments: arguments[0]

    return intrinsic(address_as)


as_run, as_serving = _typed(RUN), _typed(SERVING)
"""The run behind the address of its table."""
ints_at = _typed(INTS)
"""The vector of integers at an address."""
floats_at = _typed(REALS)
"""The vector of floating-point numbers at an address, or where another vector is."""
singles_at = _typed(VectorType(types.float32))
"""The vector of 32-bit floating-point numbers at an address."""


def _row_of(_: Any, vector: Any, row: Any, width: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        address, row, width = arguments
        bytes_each = 4 if sig.args[0].element in (types.int32, types.float32) else 8
        offset = builder.mul(builder.mul(row, width), ir.Constant(ir.IntType(64), bytes_each))
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


# -- vectors of members' clocks --------------------------------------------------------------------


@compiled
def clock_of(run: Run, row: int) -> Vector:
    """The members' clocks in a row of 64-bit numbers."""
    return row_of(run.clock, row - run.clock_first, run.members)


@compiled
def ticks_of(run: Run, process: int, task: int) -> Vector:
    """The ends of a task in 32 bits, from the base of its action, which a process runs."""
    return row_of(run.ticks, task - run.process_row[process], run.members)


@compiled
def is_short(run: Run, row: int) -> bool:
    """Whether a row of the clock is the ends of a task in 32 bits."""
    return row < run.clock_first


@compiled
def arrival_of(run: Run, key: int) -> Vector:
    """When each member has an input."""
    return row_of(run.arrivals, key, run.members)


@compiled
def copy(to: Vector, source: Vector, count: int) -> None:
    """Copy a vector."""
    for m in range(count):
        to[m] = source[m]


@compiled
def copy_shifted(to: Vector, source: Vector, amount: int, count: int) -> None:
    """Copy a vector with an amount added to every number."""
    for m in range(count):
        to[m] = source[m] + amount


@compiled
def raise_to(to: Vector, other: Vector, count: int) -> None:
    """Elementwise maximum of two vectors, into the first."""
    for m in range(count):
        to[m] = max(to[m], other[m])


@compiled
def add(to: Vector, other: Vector, count: int) -> None:
    """Add a vector to another."""
    for m in range(count):
        to[m] += other[m]


@compiled
def sum_of(to: Vector, one: Vector, other: Vector, count: int) -> None:
    """Sum of two vectors."""
    for m in range(count):
        to[m] = one[m] + other[m]


@compiled
def later_plus(to: Vector, one: Vector, other: Vector, added: Vector, count: int) -> None:
    """Elementwise maximum of two vectors, plus a third."""
    for m in range(count):
        to[m] = max(one[m], other[m]) + added[m]


@compiled
def shorten(to: Vector, source: Vector, shift: int, count: int) -> int:
    """Write a vector plus an amount in 32 bits; the result is beyond `MOST_TICKS` if a number was."""
    bits = 0
    for m in range(count):
        value = source[m] + shift
        bits |= value
        to[m] = np.int32(value)
    return bits


@compiled
def short_sum(to: Vector, one: Vector, other: Vector, added: Vector, count: int) -> int:
    """`later_plus` of 32-bit vectors and durations; the result is beyond `MOST_TICKS` if a number was."""
    bits = 0
    for m in range(count):
        value = np.int64(max(one[m], other[m])) + added[m]
        bits |= value
        to[m] = np.int32(value)
    return bits


@compiled
def raise_shifted(to: Vector, other: Vector, amount: int, count: int) -> None:
    """Elementwise maximum of a vector and of another to which an amount is added, into the first."""
    for m in range(count):
        to[m] = max(to[m], other[m] + amount)


@compiled
def largest(source: Vector, count: int) -> int:
    """The largest number of a vector."""
    result = source[0]
    for m in range(1, count):
        result = max(result, source[m])
    return result


@compiled
def smallest(source: Vector, count: int) -> int:
    """The smallest number of a vector."""
    result = source[0]
    for m in range(1, count):
        result = min(result, source[m])
    return result


@compiled
def total_of(source: Vector, count: int) -> int:
    """The sum of a vector."""
    result = 0
    for m in range(count):
        result += source[m]
    return result


@compiled
def first_with(source: Vector, value: int) -> int:
    """The first place of a vector that holds a value; one place must."""
    m = 0
    while source[m] != value:
        m += 1
    return m


# -- durations -------------------------------------------------------------------------------------

MOST_TICKS = (1 << 31) - 1
"""Latest end of a task in 32 bits, in ns from the base of its action."""
ROUNDING = 1.5 * 2.0**52
"""Added to a number of at most 2^51, it leaves the nearest whole number in the last 51 bits."""
ROUNDED = int(np.float64(ROUNDING).view(np.int64))
"""The bits of `ROUNDING`."""


@compiled
def phase_row(
    whole: Vector,
    fixed_s: float,
    row_s: float,
    load: int,
    draws: int,
    clock: int,
    cv: float,
    microbatch: int,
    members: int,
) -> None:
    """Write the nanoseconds of a phase for the members of a micro-batch into a vector of integers (eq. E1).

    The arguments from `fixed_s` to `cv` are a `Formula`.
    """
    seconds, clocks = floats_at(whole), row_of(floats_at(clock), microbatch, members)
    loads = row_of(floats_at(load), microbatch, members)
    if load != 0:
        for m in range(members):
            seconds[m] = fixed_s + row_s * loads[m]
    else:
        for m in range(members):
            seconds[m] = fixed_s + row_s * 1.0
    if draws != 0:
        normal = singles_at(draws + 4 * microbatch * members)
        for m in range(members):
            noise = np.float64(normal[m]) * cv + 1.0
            seconds[m] = seconds[m] * ((noise if noise > 0.0 else 0.0) * clocks[m]) * NS + ROUNDING
    else:
        for m in range(members):
            seconds[m] = seconds[m] * clocks[m] * NS + ROUNDING
    for m in range(members):
        whole[m] -= ROUNDED


@compiled
def fetch_row(run: Run, address: int, microbatch: int, width: int) -> None:
    """Ask the processor to fetch a row of durations, or of what makes them, ahead of its use.

    `width`: bytes of a number.
    """
    first = address + microbatch * run.members * width
    for line in range((run.members * width + 63) // 64):
        prefetch(ints_at(first + 64 * line))


# -- ends of tasks -------------------------------------------------------------------------------


@compiled
def check_ticks(run: Run, bits: int) -> None:
    """Stop the run where 32 bits did not suffice."""
    if bits < 0 or bits > MOST_TICKS:
        run.counters[ERROR] = TOO_LONG


@compiled
def payloads(run: Run, row: int, microbatch: int) -> Vector:
    """Nanoseconds of the payload of each member, alone on its links: from memory, or worked out (eq. E2)."""
    if run.task_member[row] != 0:
        return row_of(ints_at(run.task_member[row]), microbatch, run.members)
    at = microbatch % run.task_load_rows[row]
    load = row_of(floats_at(run.task_load[row]), at, run.members)
    node_load = row_of(floats_at(run.task_node_load[row]), at, run.members)
    nic_s, scale_up_s, ends, seconds = (
        run.task_nic_s[row],
        run.task_scale_up_s[row],
        run.durations,
        floats_at(run.durations),
    )
    for m in range(run.members):
        seconds[m] = max(nic_s * node_load[m], scale_up_s * load[m]) * NS + ROUNDING
    for m in range(run.members):
        ends[m] -= ROUNDED
    return ends


@compiled
def durations(run: Run, row: int, microbatch: int) -> Vector:
    """Nanoseconds of the members in a task at a row of the template tables: from memory, or worked out."""
    if run.task_rows[row] != 0:
        return row_of(ints_at(run.task_rows[row]), microbatch, run.members)
    fixed_s, row_s, cv = run.task_fixed_s[row], run.task_row_s[row], run.task_cv[row]
    load, draws, clock = run.task_received[row], run.task_draws[row], run.task_clock[row]
    phase_row(run.durations, fixed_s, row_s, load, draws, clock, cv, microbatch, run.members)
    return run.durations


@compiled
def set_end(run: Run, task: int, base: int, first: int, deps: int, last: int, own: Vector) -> None:
    """End of a task: the latest of row `base` and the tasks that it depends on, plus its own duration."""
    clock, start, members = clock_of(run, task), clock_of(run, base), run.members
    if last == deps or (last == deps + 1 and first + run.task_deps[deps] == base):
        sum_of(clock, start, own, members)
    elif last == deps + 1:
        later_plus(clock, start, clock_of(run, first + run.task_deps[deps]), own, members)
    else:
        copy(clock, start, members)
        for n in range(deps, last):
            raise_to(clock, clock_of(run, first + run.task_deps[n]), members)
        add(clock, own, members)


@compiled
def set_short_end(
    run: Run, process: int, task: int, base: int, first: int, deps: int, last: int, own: Vector
) -> None:
    """`set_end` in 32 bits, from the base of the action."""
    end, members = ticks_of(run, process, task), run.members
    start = (
        ticks_of(run, process, base) if is_short(run, base) else row_of(run.short_starts, process, members)
    )
    if last <= deps + 1:
        other = start if last == deps else ticks_of(run, process, first + run.task_deps[deps])
        check_ticks(run, short_sum(end, start, other, own, members))
    else:
        copy(end, start, members)
        for n in range(deps, last - 1):
            raise_to(end, ticks_of(run, process, first + run.task_deps[n]), members)
        other = ticks_of(run, process, first + run.task_deps[last - 1])
        check_ticks(run, short_sum(end, end, other, own, members))


@compiled
def set_ready(run: Run, process: int, task: int, row: int, microbatch: int) -> None:
    """Set when a task ends, or when a transfer is ready without the one before on the sharding stream."""
    kind, deps, last = run.task_kind[row], run.task_dep_first[row], run.task_dep_first[row + 1]
    action = run.process_action[process]
    first = run.action_first_task[action]
    base = run.process_compute[process] if kind == COMPUTE else run.process_communication[process]
    if kind == SHARDING:
        base = run.tasks + action  # its start
    own = durations(run, row, microbatch)
    if run.clock_first > 0:
        set_short_end(run, process, task, base, first, deps, last, own)
    else:
        set_end(run, task, base, first, deps, last, own)


@compiled
def add_waits(run: Run, process: int, transfer: int, ready: Vector, last: int) -> None:
    """Add how long each member waits at a barrier for the `last` one, and that one's lead over the others."""
    members, most, second, waits = (
        run.members,
        ready[last],
        ready[last],
        row_of(run.waits, transfer, run.members),
    )
    for m in range(members):
        waits[m] += most - ready[m]
    if members > 1:
        second = largest(ready, last) if last > 0 else ready[1]
        if last + 1 < members:
            second = max(second, largest(row_of(ready, last + 1, 1), members - last - 1))
    run.held_up[process * members + last] += most - second


# -- the queue of events ---------------------------------------------------------------------------

START, RESUME, LAUNCH, DEADLINE, ARRIVED, INPUT, SENT, BESIDE_ENDED = range(8)
"""Kinds of events: an actor starts; an actor goes on after a launch; a send starts; the deadline of a flow;
the last byte of a flow is there; an input is there that a process waits for; a send has ended; a collective
of the sharding stream has ended."""

KINDS = 8
LATER = 1 << 62
"""Added to the order of an event that is not urgent."""
PLACES = 1 << 20
"""An order is the number of the event times this, plus the place where the event is kept."""


@compiled
def _is_before(run: Run, at: int, time: int, order: int) -> bool:
    """Whether the event at a place in the heap comes before (time, order)."""
    first = run.queue_time[at]
    return first < time or (first == time and run.queue_order[at] < order)


@compiled
def schedule(run: Run, time: int, kind: int, subject: int, extra: int, urgent: bool) -> None:
    """Put an event of a subject (actor, key, flow or task) into the queue."""
    at = run.counters[EVENTS]
    if at >= run.most_events:
        run.counters[ERROR] = QUEUE_FULL
        return
    run.counters[EVENTS] = at + 1
    run.counters[SEQUENCE] += 1
    place = run.queue_places[at]  # the first `at` places of this list are taken
    run.queue_what[place] = subject * KINDS + kind
    run.queue_extra[place] = extra
    order = run.counters[SEQUENCE] * PLACES + place + (0 if urgent else LATER)
    times, orders = run.queue_time, run.queue_order
    while at > 0:
        parent = (at - 1) >> 1
        if _is_before(run, parent, time, order):
            break
        times[at] = times[parent]
        orders[at] = orders[parent]
        at = parent
    times[at] = time
    orders[at] = order


@compiled
def after(run: Run, delay: int, kind: int, subject: int, extra: int) -> None:
    """Schedule an event that is not urgent, `delay` nanoseconds from now."""
    schedule(run, run.counters[NOW] + delay, kind, subject, extra, False)


@compiled
def take_first(run: Run) -> int:
    """Take the first event out of the queue and set the clock to its time; return the place that keeps it.

    What is kept there stays until the next event is scheduled.
    """
    times, orders = run.queue_time, run.queue_order
    run.counters[NOW] = times[0]
    taken = orders[0] % PLACES
    run.counters[EVENTS] -= 1
    count = run.counters[EVENTS]
    run.queue_places[count] = taken
    time, order = times[count], orders[count]
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _is_before(run, child + 1, times[child], orders[child]):
            child += 1
        if not _is_before(run, child, time, order):
            break
        times[at] = times[child]
        orders[at] = orders[child]
        at = child
    times[at] = time
    orders[at] = order
    return taken
