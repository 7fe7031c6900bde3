"""Turns the output of DeepEP's own tests (first and second generation) into expert-parallel curves.

The formats are those of deepseek-ai/DeepEP tests/test_intranode.py and tests/legacy/test_internode.py
("[tuning] Best ...") and tests/elastic/test_ep.py ("EP: rank/ranks | dispatch: ..."). The printed bandwidths
are logical, that is they count rows that stay on the own rank or node; link shares written here do not.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile, MeasuredCurve
from moesim.hwmodels.errors import InputError
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

_FIRST = re.compile(
    r"\[tuning\] Best (?P<operation>dispatch|combine)(?: \((?P<dtype>FP8|BF16)\))?: SMs (?P<sms>\d+), "
    r"NVL chunk \d+(?:, RDMA chunk \d+)?[:,] (?:(?P<notify>[\d.]+) \+ (?P<time>[\d.]+) us, )?"
    r"(?:(?P<rdma>[\d.]+) GB/s \(RDMA\), )?(?P<nvl>[\d.]+) GB/s \(NVL\)(?:, t: (?P<time2>[\d.]+) us)?"
)
_SECOND = re.compile(
    r"EP:\s*(?P<rank>\d+)/(?P<ranks>\d+) \| (?P<operation>expanded dispatch|cached dispatch|dispatch|"
    r"reduced combine|combine): (?P<so>\d+) GB/s \(SO\), (?P<su>\d+) GB/s \(SU\), (?P<time>[\d.]+) us, "
    r"(?P<bytes>\d+) bytes"
)
_RANKS = re.compile(r"> Ranks: (\d+) x (\d+)")
_SMS = re.compile(r"> #SM: (\d+)")
_TESTED = re.compile(r"use_fp8_dispatch=([01])")
_TOKENS = re.compile(r"(?:num_tokens=|> Tokens: )(\d+)\D.*?hidden[=:] ?(\d+)")

MOST_RANKS = 65_536
MOST_DIGITS = 15
MOST_FIGURE = 1e15
"""Largest accepted figure, in microseconds or GB/s."""

Operation = Literal["dispatch", "combine"]


class EpRecord(Struct, frozen=True):
    """One printed figure; rates are logical, in bytes/s, and `scale_out` is 0 inside a node."""

    generation: int
    operation: str
    dtype: str
    sms: int
    ranks: int
    nodes: int
    scale_up_bytes_per_s: float
    scale_out_bytes_per_s: float
    seconds: float | None
    tokens: int | None = None


def deepep_profile(
    paths: Iterable[Path],
    *,
    accelerator: str,
    ranks: int | None = None,
    kernels: str = "deepep-imported",
    nic_bytes_per_s: float | None = None,
    local_traffic_counted: bool = True,
    dispatch_dtype: Literal["FP8", "BF16"] = "FP8",
) -> CalibrationProfile:
    """A profile of DeepEP outputs of one machine, from one or several runs (numbers of SMs).

    Runs inside a node give `ep.<operation>.sm_rate` and `.scale_up_fraction`; runs across nodes, with the
    nominal NIC rate, give `ep.nic_fraction.<kernels>`. The first generation does not print `ranks`, which
    must then be stated. Raises InputError for a file without results or with missing facts.
    """
    paths = list(paths)
    records: list[EpRecord] = []
    for path in paths:
        records += parse(read_log(path), str(path), ranks)
    if not records:
        raise InputError("no file was given; name at least one output of DeepEP's tests")
    place = ", ".join(str(path) for path in paths)
    target = meant_accelerator(accelerator, None, place)
    kept = [r for r in records if r.operation == "combine" or r.dtype in (dispatch_dtype, "")]
    if not local_traffic_counted:
        # Rows that stay on the own rank or node are added to rates without them (--ignore-local-traffic).
        kept = [
            replace(
                r,
                scale_up_bytes_per_s=r.scale_up_bytes_per_s * _whole_over_rest(r.ranks // r.nodes),
                scale_out_bytes_per_s=r.scale_out_bytes_per_s * _whole_over_rest(r.nodes),
            )
            for r in kept
        ]
    generations = sorted({r.generation for r in kept})
    origin = Origin(
        title=f"DeepEP's own test, generation {' and '.join(map(str, generations))}",
        date=file_date(paths[0]),
        device=target.title,
    )
    curves = [*_inside_node(kept, target, origin, place)]
    curves += _across_nodes(kept, origin, kernels, nic_bytes_per_s, place)
    if not curves:
        raise InputError(
            f"{place}: no dispatch in {dispatch_dtype} and no combine among {len(records)} figures; "
            "choose the other format with --dispatch-dtype"
        )
    return imported_profile(
        f"deepep-{paths[0].stem.lower()}"[:60],
        target,
        curves,
        software=f"DeepEP generation {' and '.join(map(str, generations))}",
        description="Dispatch and combine as DeepEP's own tests print them.",
        dispatchers=(kernels,) if any(c.id.endswith(f".{kernels}") for c in curves) else (),
    )


def _whole_over_rest(members: int) -> float:
    return members / (members - 1) if members > 1 else 1.0


def parse(text: str, place: str, ranks: int | None = None) -> list[EpRecord]:
    """The best figures (first generation) or the figures of every rank (second generation) of an output.

    Raises InputError where there is none, or where the number of ranks is neither printed nor stated.
    """
    records: list[EpRecord] = []
    shape, sms, dtype = (1, 0), 0, ""
    tokens: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MOST_LINE:
            continue
        where = f"{place}, line {number}"
        if match := _RANKS.search(line):
            shape = _whole(match[1], where), _whole(match[2], where)
        if match := _SMS.search(line):
            sms = _whole(match[1], where)
        if match := _TESTED.search(line):
            dtype = "FP8" if match[1] == "1" else "BF16"
        if match := _TOKENS.search(line):
            tokens = _whole(match[1], where)
        if match := _FIRST.search(line):
            records.append(_first(match, ranks, tokens, where))
        elif match := _SECOND.search(line):
            records += _second(match, shape, sms, dtype, tokens, where)
    if not records:
        raise InputError(
            f"{place}: no result of DeepEP's tests found; lines such as '[tuning] Best dispatch (FP8): SMs "
            "24, NVL chunk 12, 323.00 GB/s (NVL)' (first generation) or 'EP:   0/8 | dispatch: ...' (second) "
            "are expected"
        )
    return records


def _first(match: re.Match[str], ranks: int | None, tokens: int | None, where: str) -> EpRecord:
    if ranks is not None and not 2 <= ranks <= MOST_RANKS:
        raise InputError(f"{where}: --ranks {ranks}: an expert-parallel group has 2 to {MOST_RANKS:,} ranks")
    if ranks is None:
        raise InputError(
            f"{where}: this generation of DeepEP does not print the number of ranks; state it (--ranks 8)"
        )
    rdma = _rate(match["rdma"], where) if match["rdma"] else 0.0
    if rdma and (ranks % 8 or ranks < 16):
        raise InputError(f"{where}: an inter-node result needs 16, 24, 32 ... ranks (8 a node), not {ranks}")
    time = match["time"] or match["time2"]
    return EpRecord(
        generation=1,
        operation=match["operation"],
        dtype=match["dtype"] or "",
        sms=_sms(_whole(match["sms"], where), where),
        ranks=ranks,
        nodes=ranks // 8 if rdma else 1,
        scale_up_bytes_per_s=_rate(match["nvl"], where),
        scale_out_bytes_per_s=rdma,
        seconds=finite(time, where, MOST_FIGURE) * 1e-6 if time else None,
        tokens=tokens,
    )


def _second(
    match: re.Match[str], shape: tuple[int, int], sms: int, dtype: str, tokens: int | None, where: str
) -> list[EpRecord]:
    if match["operation"] not in ("dispatch", "combine"):
        return []  # cached, expanded and reduced variants measure other operations
    ranks = _whole(match["ranks"], where)
    if shape[0] * shape[1] != ranks or not sms:
        raise InputError(
            f"{where}: a result of {ranks} ranks without '> Ranks: a x b' and '> #SM: n' before it; "
            "give the whole output"
        )
    if not 2 <= ranks <= MOST_RANKS:
        raise InputError(f"{where}: {ranks} ranks; an expert-parallel group has 2 to {MOST_RANKS:,}")
    seconds = finite(match["time"], where, MOST_FIGURE) * 1e-6
    size = _whole(match["bytes"], where)
    if seconds <= 0.0 or size <= 0:
        raise InputError(f"{where}: {size} bytes in {seconds * 1e6:g} us is not a measurement")
    return [
        EpRecord(
            generation=2,
            operation=match["operation"],
            dtype=dtype if match["operation"] == "dispatch" else "",
            sms=_sms(sms, where),
            ranks=ranks,
            nodes=shape[0],
            scale_up_bytes_per_s=size / seconds,
            scale_out_bytes_per_s=finite(match["so"], where, MOST_FIGURE) * 1e9,
            seconds=seconds,
            tokens=tokens,
        )
    ]


def _inside_node(
    records: list[EpRecord], accelerator: Accelerator, origin: Origin, place: str
) -> list[MeasuredCurve]:
    curves = []
    nominal = accelerator.scale_up_bytes_per_s
    for operation in ("dispatch", "combine"):
        chosen = [r for r in records if r.operation == operation and r.nodes == 1]
        if not chosen:
            continue
        by_sms: dict[int, list[float]] = defaultdict(list)
        for record in chosen:
            by_sms[record.sms].append(record.scale_up_bytes_per_s)
        points = [(float(n), statistics.median(rates)) for n, rates in sorted(by_sms.items())]
        error = _spread(by_sms.values())
        ranks = {r.ranks for r in chosen}
        if len(ranks) > 1:
            raise InputError(f"{place}: runs of {sorted(ranks)} ranks mixed; import them one by one")
        crossing = 1.0 - 1.0 / ranks.pop()
        if (top := max(rate for _, rate in points) * crossing / nominal) > 1.05:
            raise InputError(
                f"{place}: {operation} would carry {top:.2f} of the nominal {nominal / 1e9:g} GB/s of "
                f"{accelerator.name}; check the accelerator, the ranks and whether local traffic is counted"
            )
        what = f"{operation}, {_tokens(chosen)}, inside one node, by communication SMs"
        stated = residual(max(0.03, error), "spread between runs and ranks, at least 3 %")
        share = [(n, rate * crossing / nominal) for n, rate in points]
        for id_, values, y in (
            ("sm_rate", [(n, rate / 1e9) for n, rate in points], ("payload, own-rank rows included", "GB/s")),
            ("scale_up_fraction", share, ("payload crossing NVLink over the nominal link rate", "1")),
        ):
            x = ("communication SMs", "SMs")
            named = f"ep.{operation}.{id_}"
            curves.append(curve(named, values, x=x, y=y, origin=origin, what=what, error=stated))
    return curves


def _across_nodes(
    records: list[EpRecord], origin: Origin, kernels: str, nic: float | None, place: str
) -> list[MeasuredCurve]:
    chosen = [r for r in records if r.nodes > 1]
    if not chosen:
        return []
    if nic is None or nic <= 0.0:
        raise InputError(
            f"{place}: an inter-node result; state the nominal rate of a GPU's NIC per direction "
            '(--nic "50 GB/s") so that the share of it can be written'
        )
    by_nodes: dict[int, list[float]] = defaultdict(list)
    for r in chosen:
        by_nodes[r.nodes].append(r.scale_out_bytes_per_s * (1.0 - 1.0 / r.nodes) / nic)
    points = [(float(nodes), statistics.median(shares)) for nodes, shares in by_nodes.items()]
    if (top := max(share for _, share in points)) > 1.05:
        raise InputError(
            f"{place}: {top:.2f} of the stated NIC rate, which cannot be; check --nic and --ranks"
        )
    error = residual(
        max(0.03, _spread(by_nodes.values())), "spread between dispatch, combine and ranks, at least 3 %"
    )
    return [
        curve(
            f"ep.nic_fraction.{kernels}",
            points,
            x=("nodes of the group", "nodes"),
            y=("payload on the wire over the nominal NIC rate", "1"),
            origin=origin,
            what=f"dispatch and combine, {_tokens(chosen)}, by nodes",
            error=error,
        )
    ]


def _spread(groups: Iterable[list[float]]) -> float:
    return max((max(v) - min(v)) / 2 / statistics.median(v) for v in groups)


def _tokens(records: list[EpRecord]) -> str:
    counts = sorted({r.tokens for r in records if r.tokens})
    return f"{' and '.join(f'{n:,}' for n in counts)} tokens" if counts else "tokens not printed"


def _sms(value: int, where: str) -> int:
    if not 1 <= value <= 1024:
        raise InputError(f"{where}: {value} communication SMs cannot be; 1 to 1,024 are expected")
    return value


def _rate(text: str, where: str) -> float:
    value = finite(text, where, MOST_FIGURE) * 1e9
    if value <= 0.0:
        raise InputError(f"{where}: a bandwidth of {text} GB/s is not a measurement")
    return value


def _whole(text: str, where: str) -> int:
    if len(text) > MOST_DIGITS:
        raise InputError(f"{where}: {text[:40]!r} has more than {MOST_DIGITS} digits")
    return int(text)


DEEPEP = CalibrationImporter(
    name="deepep",
    help="Read DeepEP's printed bandwidths (both generations) into a calibration profile.",
    log="What DeepEP's tests printed.",
    read=deepep_profile,
    several=True,
    options=(
        ImportOption("accelerator", "Accelerator they ran on.", required=True),
        ImportOption("ranks", "Ranks, which the first generation does not print.", type=int),
        ImportOption(
            "kernels", "Name of the generation: curve ep.nic_fraction.NAME.", default="deepep-imported"
        ),
        NIC,
        ImportOption(
            "dispatch_dtype",
            "Format of the dispatched rows: FP8 or BF16.",
            default="FP8",
            choices=("FP8", "BF16"),
        ),
    ),
)
