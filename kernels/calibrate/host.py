"""Measures how long this host takes for the calls of a step, and writes a host that a scenario can name.

A call is repeated in a chain on tiny tensors, so that the host and not the GPU sets the time. The times are
comparable with those of the shipped host `LIKE`, whose kinds that one GPU cannot show (collectives between
GPUs, FSDP2, modules of libraries) are taken times the mean ratio of those that were measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, get_args

import yaml

from moesim.hwmodels.files import write_atomically
from moesim.hwmodels.host import CallKind, Host, HostCall, load_host
from moesim.hwmodels.provenance import SourcedFraction
from moesim.hwmodels.units import format_quantity
from moesim.kernels.calibrate.compute import torch
from moesim.kernels.calibrate.entries import Rows
from moesim.kernels.calibrate.pieces import normal
from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample, TimedRow

LIKE = "emerald-rapids-vm"
NAME = "host"
CHAIN = 60
SIDE = 128
Step = Callable[[Any, int], Any]

# -- calls -------------------------------------------------------------------------------------------------


def _steps() -> dict[CallKind, tuple[Step, Callable[[], Any]]]:
    """One operator of a chain by kind of call, and the tensor that the chain begins with."""
    t = torch()
    f, n = t.nn.functional, SIDE
    weights, gains = ([normal(*shape, grad=True) for _ in range(CHAIN)] for shape in ((n, n), (n,)))
    experts = [normal(8, n, n, grad=True) for _ in range(CHAIN)]
    ends = t.arange(1, 9, device="cuda", dtype=t.int32) * (n // 8)
    index, turn = t.randperm(n, device="cuda"), t.polar(t.ones(n, 1, 32), t.randn(n, 1, 32)).cuda()

    def rope(y: Any, j: int) -> Any:
        z = t.view_as_complex(y.float().view(*y.shape[:-1], -1, 2))
        return t.view_as_real(z * turn).flatten(3).to(y.dtype)

    def put(y: Any, j: int) -> Any:
        z = t.zeros_like(y)
        z[index] = y
        return z

    square: Callable[[], Any] = lambda: normal(n, n, grad=True)  # noqa: E731
    heads: Callable[[], Any] = lambda: normal(1, 4, n, 64, grad=True)  # noqa: E731
    return {
        "product": (lambda y, j: f.linear(y, weights[j]), square),
        "grouped product": (lambda y, j: t._grouped_mm(y, experts[j], offs=ends), square),
        "attention": (lambda y, j: f.scaled_dot_product_attention(y, y, y, is_causal=True), heads),
        "norm": (lambda y, j: f.rms_norm(y, (n,), gains[j]), square),
        "pointwise": (lambda y, j: f.silu(y), square),
        "copy": (lambda y, j: t.cat(t.split(y, [48, n - 48], dim=-1), dim=-1), square),
        "index": (lambda y, j: y[index], square),
        "put": (put, square),
        "rope": (rope, lambda: normal(1, n, 4, 64, grad=True)),
    }


def _of_gate() -> list[Callable[[], Any]]:
    """The calls of a router's chain, forward."""
    t, n = torch(), SIDE
    scores, chosen = t.randn(n, 64, device="cuda"), t.randint(0, 64, (n * 4,), device="cuda")
    logits = normal(n, 64)
    return [
        logits.float,
        lambda: t.softmax(scores, dim=1),
        lambda: scores + 1.0,
        lambda: t.topk(scores, 4, dim=-1, sorted=False),
        lambda: scores.gather(1, chosen.view(n, 4)),
        lambda: scores * 1.0001,
        lambda: t.histc(chosen, bins=64, min=0, max=64),
        lambda: t.argsort(chosen, stable=True),
        lambda: scores[chosen],
    ]


def _repeated(call: Callable[[], Any]) -> list[Any]:
    """Results of CHAIN calls, all held so that no tensor is freed between two of them."""
    return [call() for _ in range(CHAIN)]


def _timed(call: Callable[[], Any], repeats: int, per: int) -> tuple[float, ...]:
    """Host seconds of one of the `per` calls in `call`, each repeat from an idle GPU."""
    t, times = torch(), []
    for _ in range(repeats + 2):
        t.cuda.synchronize()
        begin = time.perf_counter()
        kept = call()
        times.append((time.perf_counter() - begin) / per)
        del kept
    t.cuda.synchronize()
    return tuple(times[2:])


def _chained(step: Step, start: Callable[[], Any], repeats: int) -> tuple[tuple[float, ...], list[float]]:
    """Host seconds of one operator of a chain, forward and backward."""
    t, forward, backward = torch(), [], []
    for _ in range(repeats + 2):
        y = start()
        t.cuda.synchronize()
        marks = [time.perf_counter()]
        for j in range(CHAIN):
            y = step(y, j)
        marks.append(time.perf_counter())
        g = t.ones_like(y)
        t.cuda.synchronize()
        marks.append(time.perf_counter())
        y.backward(g)
        marks.append(time.perf_counter())
        t.cuda.synchronize()
        forward.append((marks[1] - marks[0]) / CHAIN)
        backward.append((marks[3] - marks[2]) / CHAIN)
    return tuple(forward[2:]), backward[2:]


CALLS = (
    "product",
    "grouped product",
    "attention",
    "norm",
    "pointwise",
    "copy",
    "index",
    "put",
    "rope",
    "gate",
)
READ, COMPILED = "read of a result", "compiled call"
"""What is measured beside the kinds of calls: the host reads one number, and calls code of torch.compile."""


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    compiled = (COMPILED,) if {"triton", "C compiler"} <= facts.libraries else ()
    return [{"call": kind} for kind in (*CALLS, READ, *compiled)]


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    t, kind = torch(), p["call"]
    t.cuda.set_device(session.devices[0])
    if kind == READ:
        one = t.ones((), device="cuda")
        return Sample(_timed(partial(_repeated, one.item), session.repeats, CHAIN))
    if kind == "gate":
        of_calls = [_timed(partial(_repeated, call), session.repeats, CHAIN) for call in _of_gate()]
        return Sample(tuple(fmean(times) for times in zip(*of_calls, strict=True)))
    if kind == COMPILED:
        function = t.compile(lambda y: t.nn.functional.silu(y) * y, dynamic=False)
        forward, backward = _chained(
            lambda y, j: function(y), lambda: normal(SIDE, SIDE, grad=True), session.repeats
        )
    else:
        step, start = session.keep(("host",), _steps)[kind]
        forward, backward = _chained(step, start, session.repeats)
    return Sample(forward, {"backward_s": sorted(backward)[len(backward) // 2]})


MEASUREMENT = Grid(
    name=NAME,
    title="calls of the host",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.4,
    setup_s=2.0,
    libraries=("cupy", "torch"),
    of_model=True,
)

# -- the host as data --------------------------------------------------------------------------------------


def host_of(rows: Rows) -> Host | None:
    """This host: measured calls, the others as those of `LIKE` times the mean ratio; None without rows."""
    base = load_host(LIKE)
    found = {row.parameters["call"]: row for row in rows.of(NAME)}
    kinds: list[CallKind] = [kind for kind in get_args(CallKind) if kind in found]
    if not kinds:
        return None
    ratios = [found[kind].seconds / base.calls[kind].forward for kind in kinds]
    ratio = geometric_mean(ratios)
    note = "; ".join(_beside(found))
    return Host(
        name=f"{rows.name}-host",
        title=f"Host of {rows.origin.title.removeprefix('moesim calibrate on ')}",
        cpu=_processor(),
        software=f"torch {_version('torch')}, driver {rows.origin.driver}",
        like=LIKE,
        calls={kind: _call(found[kind], base.calls[kind], ratio, rows) for kind in kinds},
        factor=SourcedFraction(
            value=round(ratio, 4),
            between=(round(min(*ratios, ratio * 0.99), 4), round(max(*ratios, ratio * 1.01), 4)),
            kind="derived",
            source=f"{rows.origin.source('forward of ' + ', '.join(kinds))}, over those of {LIKE}: "
            "geometric mean, range of all",
            date=rows.origin.date,
        ),
        note=note or None,
    )


def _call(row: TimedRow, like: HostCall, ratio: float, rows: Rows) -> HostCall:
    """A measured call; a backward that was not measured is that of the other host times the mean ratio."""
    backward = row.values.get("backward_s", like.backward * ratio)
    return HostCall(
        forward=row.seconds,
        backward=backward,
        kind="measured" if "backward_s" in row.values else "derived",
        source=rows.origin.source(f"{row.parameters['call']}, tiny tensors, a chain of {CHAIN}"),
        date=rows.origin.date,
    )


def _beside(found: Mapping[Parameter, TimedRow]) -> list[str]:
    """What was measured beside the calls, in words."""
    return [f"{kind}: {found[kind].seconds * 1e6:.1f} us" for kind in (READ, COMPILED) if kind in found]


def write_host(host: Host, path: Path) -> Path:
    """Write the file that a scenario names as `software.host`."""
    data = host.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    for kind, call in data["calls"].items():
        for side in ("forward", "backward"):
            call[side] = format_quantity(getattr(host.calls[kind], side), "s")
    write_atomically(path, [yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)])
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
