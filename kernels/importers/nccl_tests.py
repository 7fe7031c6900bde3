"""Turns nccl-tests results (the JSON of -J, or the printed table) into curves of collectives.

The formats are those of NVIDIA/nccl-tests@0fdb00a3f433 src/util.cu and doc/PERFORMANCE.md. The JSON holds the
whole environment of the run, secrets included, so only the keys named here are read, and host names are
counted but not stored.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from msgspec import Struct

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.kernels.export import Origin, curve, residual
from moesim.kernels.importers.common import (
    MOST_LINE,
    NIC,
    CalibrationImporter,
    ImportOption,
    file_date,
    finite,
    imported_profile,
    meant_accelerator,
    read_log,
)

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv")
"""Names of the programs of nccl-tests, without `_perf`."""

ENTRY_NAMES = {"alltoall": "all_to_all"}
"""Operations that profiles call by another name than nccl-tests does."""
MIB = float(2**20)

_OPERATION = re.compile(rf"\b({'|'.join(OPERATIONS)})(?:_perf)?\b")


class NcclRow(Struct, frozen=True):
    """One message size: total bytes of the array and mean seconds of the run."""

    size_bytes: int
    seconds: float
    spread: float
    """Half the relative difference between out-of-place and in-place times."""


class NcclRun(Struct, frozen=True):
    """One run of one collective."""

    operation: str
    ranks: int
    nodes: int
    device: str | None
    version: str | None
    date: str | None
    rows: tuple[NcclRow, ...]

    def bus_bytes_per_s(self, row: NcclRow) -> float:
        """Bytes/s on every rank's link: the algorithm bandwidth times the factor of nccl-tests."""
        return row.size_bytes / row.seconds * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """Ratio of busbw to algbw (doc/PERFORMANCE.md of nccl-tests)."""
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "alltoall": share}
    return factors.get(operation, 1.0)


def nccl_tests_profile(
    path: Path,
    *,
    accelerator: str | None = None,
    operation: str | None = None,
    nic_bytes_per_s: float | None = None,
) -> CalibrationProfile:
    """A profile of one nccl-tests file, which is JSON by its extension or else the printed table.

    An all-gather inside a node gives `collective.scale_up_fraction`; across nodes (with the nominal NIC
    rate) `collective.nic_fraction`; every operation gives
    `nccl.<operation>.busbw.<group>`, which prices of that operation read (eq. X16). Raises InputError for
    a file in neither format, for wrong results, and for facts that are neither in the file nor stated.
    """
    text = read_log(path)
    json_file = path.suffix.lower() == ".json"
    run = parse_json(text, str(path), operation) if json_file else parse_text(text, str(path), operation)
    target = meant_accelerator(accelerator, run.device, str(path))
    origin = Origin(
        title=f"nccl-tests {run.operation}_perf on {run.ranks} ranks of {run.nodes} node(s)",
        date=run.date or file_date(path),
        device=run.device,
        note=f"NCCL {run.version}" if run.version else None,
    )
    return imported_profile(
        f"nccl-{run.operation.replace('_', '-')}-{path.stem.lower()}"[:60],
        target,
        _curves(run, target, origin, nic_bytes_per_s, str(path)),
        software=f"NCCL {run.version or 'of unknown version'}",
        description=f"{run.operation} of nccl-tests over {run.ranks} ranks on {run.nodes} node(s).",
    )


def parse_json(text: str, place: str, operation: str | None = None) -> NcclRun:
    """The run in the JSON that -J writes; raises InputError for anything else."""
    data = parse_mapping(text, place if place.endswith(".json") else f"{place}.json")
    config, devices, args = (data.get(key) for key in ("config", "devices", "args"))
    devices = devices if devices is not None else _inside(config).get("devices")
    results = data.get("results")
    if not isinstance(results, list) or not isinstance(devices, list) or not devices:
        raise InputError(
            f"{place}: not the JSON of nccl-tests: the lists results and devices are missing; "
            "write it with -J file.json"
        )
    seen = _inside(devices[0])
    threads, gpus = (max(1, _count(_inside(config).get(key), 1)) for key in ("nthreads", "ngpus"))
    rows = []
    for i, item in enumerate(results):
        where, times = f"{place}: results[{i}]", []
        for key in ("out_of_place", "in_place"):
            if part := _inside(_inside(item).get(key)):
                wrong = part.get("nwrong")
                _refuse_wrong(wrong if isinstance(wrong, int | float) else 0, where)
                times.append(_positive(part.get("time"), f"{where}.{key}.time"))
        rows.append(_row(_count(_inside(item).get("size"), 0), times))
    program = args[0] if isinstance(args, list) and args and isinstance(args[0], str) else ""
    start = data.get("start_time")
    return _run(
        place,
        operation or _operation(program),
        ranks=len(devices) * threads * gpus,
        nodes=len({str(_inside(d).get("hostname")) for d in devices}),
        device=seen.get("device_info") if isinstance(seen.get("device_info"), str) else None,
        version=_version(data.get("nccl_version")),
        date=start[:10] if isinstance(start, str) and re.match(r"\d{4}-\d{2}-\d{2}", start) else None,
        rows=rows,
    )


def parse_text(text: str, place: str, operation: str | None = None) -> NcclRun:
    """The run in a printed table with a known header; raises InputError where there is no such table."""
    header: list[str] = []
    devices: dict[int, tuple[str, str | None]] = {}
    rows: list[NcclRow | None] = []
    found, version = operation, None
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MOST_LINE:
            continue
        if (seen := _device(line.split())) is not None:
            devices[seen[0]] = seen[1:]
        elif line.startswith("#"):
            words = line.lstrip("# ").split()
            if "size" in words and "busbw" in words:
                header = words
            if found is None and "starting" in line:
                found = _operation(line)
            if (library := re.search(r"nccl-library=(\d{1,9})", line)) is not None:
                version = _version(int(library[1]))
        elif header and re.match(r"\s*\d+\s+\d+\s", line):
            rows.append(_text_row(header, line.split(), f"{place}, line {number}"))
    if not header:
        raise InputError(
            f"{place}: no table of nccl-tests found (a header line with size, time and busbw); "
            "give its whole output, comment lines included, or its JSON (-J)"
        )
    device = next((name for _, name in devices.values() if name), None)
    return _run(
        place,
        found,
        ranks=len(devices),
        nodes=len({host for host, _ in devices.values()}),
        device=device,
        version=version,
        date=None,
        rows=rows,
    )


def _device(words: list[str]) -> tuple[int, str, str | None] | None:
    """(rank, host, GPU) of a line "# Rank 0 Group 0 Pid 1 on HOST device 0 [0000:00:00] GPU", or None."""
    if words[:2] != ["#", "Rank"] or len(words) < 3 or not (words[2].isdecimal() and len(words[2]) < 10):
        return None
    try:
        at = words.index("on", 3)
        close = next(i for i in range(at + 4, len(words)) if words[i].endswith("]"))
    except (ValueError, StopIteration):
        return None
    if words[at + 2] != "device" or not words[at + 4].startswith("["):
        return None
    return int(words[2]), words[at + 1], " ".join(words[close + 1 :]) or None


def _run(
    place: str,
    operation: str | None,
    *,
    ranks: int,
    nodes: int,
    device: str | None,
    version: str | None,
    date: str | None,
    rows: list[NcclRow | None],
) -> NcclRun:
    if operation not in OPERATIONS:
        raise InputError(
            f"{place}: the collective that was measured is unknown ({operation!r}); "
            f"state one of {', '.join(OPERATIONS)} (--operation)"
        )
    if ranks < 2:
        raise InputError(f"{place}: {ranks} rank(s) found; a collective over at least 2 GPUs is needed")
    usable = tuple(row for row in rows if row is not None)
    if not usable:
        raise InputError(f"{place}: no row with a size and a time above 0; nothing to import")
    return NcclRun(operation, ranks, max(1, nodes), device, version, date, usable)


def _text_row(header: list[str], cells: list[str], where: str) -> NcclRow | None:
    columns = [i for i, name in enumerate(header) if name == "time"]
    if len(columns) != 2:
        raise InputError(
            f"{where}: the table has {len(columns)} columns 'time', expected 2 (out of place and in place); "
            "run without -C 1, which reports CPU time"
        )
    width = columns[1] - columns[0]
    if len(cells) < columns[1]:
        raise InputError(f"{where}: {len(cells)} values under a header of {len(header)}; the line is cut off")
    starts = columns if len(cells) > columns[1] + 1 else columns[:1]  # a trace replay prints in-place only
    times = []
    for start in starts:
        block = dict(zip(header[start : start + width], cells[start : start + width], strict=False))
        wrong = block.get("#wrong", block.get("error", "0"))
        _refuse_wrong(0.0 if wrong == "N/A" else finite(wrong, where), where)
        times.append(_positive(cells[start], where))
    return _row(_count(cells[header.index("size")], 0), times)


def _row(size: int, times_us: list[float]) -> NcclRow | None:
    if size <= 0 or not times_us:
        return None
    mean = statistics.fmean(times_us)
    return NcclRow(size, mean * 1e-6, (max(times_us) - min(times_us)) / 2 / mean)


def _refuse_wrong(wrong: float, where: str) -> None:
    if wrong > 0:
        raise InputError(
            f"{where}: {wrong:g} values were wrong, so the collective is broken and its time means nothing; "
            "fix the run and measure again"
        )


def _curves(
    run: NcclRun, accelerator: Accelerator, origin: Origin, nic: float | None, place: str
) -> list[MeasuredCurve]:
    rows = sorted(run.rows, key=lambda row: row.size_bytes)
    by_size = {row.size_bytes: row for row in rows}
    spread = statistics.median(row.spread for row in rows)
    error = residual(max(0.02, spread), "half-difference of out-of-place and in-place, at least 2 %")
    what = f"{run.operation} over {run.ranks} ranks on {run.nodes} node(s)"
    # An all-gather's size is the array of all ranks together; that of the others is one rank's.
    parts = run.ranks if run.operation == "all_gather" else 1
    # The group stands in the entry's id, so that curves of several groups stand beside each other.
    size_of_group = f"{run.ranks}-ranks-{run.nodes}-node{'' if run.nodes == 1 else 's'}"
    group = origin.conditions().model_copy(update={"ranks": run.ranks, "nodes": run.nodes})
    curves = [
        curve(
            f"nccl.{ENTRY_NAMES.get(run.operation, run.operation)}.busbw.{size_of_group}",
            [(size / parts / MIB, run.bus_bytes_per_s(row) / 1e9) for size, row in by_size.items()],
            x=("bytes that a rank contributes", "MiB"),
            y=("bus bandwidth", "GB/s"),
            origin=origin,
            what=what,
            error=error,
            conditions=group,
            interpolation="log",
        )
    ]
    if run.operation not in ("all_gather", "reduce_scatter"):
        return curves
    if run.nodes == 1:
        nominal = accelerator.scale_up_bytes_per_s
        points = [(size / run.ranks / MIB, run.bus_bytes_per_s(r) / nominal) for size, r in by_size.items()]
        id_, x, y = "collective.scale_up_fraction", ("bytes a rank contributes", "MiB"), "NVLink rate"
    else:
        if nic is None:
            raise InputError(
                f"{place}: measured over {run.nodes} nodes; state the nominal rate of a GPU's NIC per "
                'direction (--nic "50 GB/s") so that the share of it can be written'
            )
        share = run.bus_bytes_per_s(rows[-1]) / (run.ranks / run.nodes) / nic
        points, id_ = [(float(run.nodes), share)], "collective.nic_fraction"
        x, y = ("nodes of the group", "nodes"), "NIC rate"
    if (top := max(share for _, share in points)) > 1.05:
        raise InputError(
            f"{place}: {top:.2f} of the nominal {y} of {accelerator.name}, which cannot be; check the "
            "accelerator, the operation and the NIC rate (in-network reduction carries less than it counts)"
        )
    extra = curve(
        id_,
        points,
        x=x,
        y=(f"bus bandwidth over the nominal {y}", "1"),
        origin=origin,
        what=what,
        error=error,
        interpolation="log" if run.nodes == 1 else "linear",
    )
    return [extra, *curves]


def _operation(text: str) -> str | None:
    match = _OPERATION.search(text.rsplit("/", 1)[-1].replace("all_to_all", "alltoall"))
    return match[1] if match else None


def _version(value: object) -> str | None:
    """The version of a code of NCCL, such as 2.27.3 for 22703."""
    if not isinstance(value, int) or value < 10_000:
        return None
    return f"{value // 10000}.{value % 10000 // 100}.{value % 100}"


def _inside(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object, otherwise: int) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return int(number) if 0 <= number < 2**53 else otherwise


def _positive(value: object, where: str) -> float:
    number = finite(value, where)
    if number <= 0.0:
        raise InputError(f"{where}: a time of {number:g} us is not a measurement")
    return number


NCCL_TESTS = CalibrationImporter(
    name="nccl-tests",
    help="Read nccl-tests output into a calibration profile.",
    log="Output of nccl-tests: JSON or text.",
    read=nccl_tests_profile,
    options=(
        ImportOption("accelerator", "Accelerator, where the log does not say."),
        ImportOption("operation", "Operation, where the log does not say."),
        NIC,
    ),
)
