"""Compares measured collectives with predicted ones; every row has a class, every error is computed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from statistics import median
from typing import Literal

from pydantic import TypeAdapter

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.network import load_network
from moesim.hwmodels.node import load_node
from moesim.hwmodels.topologies import Topology, build_topology
from moesim.simulator.cost.collectives.library import load_library
from moesim.simulator.cost.collectives.registry import collective, neighbour_sends
from moesim.simulator.layout.routing import Gate
from moesim.simulator.model.precision import Format, row_bytes
from moesim.simulator.scoring import published_records
from moesim.simulator.scoring.published import KernelBenchmark, Row, benchmark_seconds

Use = Literal[
    "scored",
    "nvls",
    "unstated",
    "peak",
    "latency",
    "expert-parallel",
    "calibrated",
    "elsewhere",
    "unscorable",
]
"""Class of a row. `scored`: 1 MiB and more, topology stated, no in-switch reduction. The next five are
predicted and reported, but not scored; the others are not predicted."""

PREDICTED: tuple[Use, ...] = ("scored", "nvls", "unstated", "peak", "latency", "expert-parallel")
TITLES: dict[str, str] = {
    "scored": "Scored: 1 MiB and more, topology stated, no in-switch reduction",
    "nvls": "Reported: in-switch reduction (NVLS), 1 MiB and more",
    "unstated": "Reported: NVLS setting not stated",
    "peak": "Reported: peaks of a vendor's slide, no size stated",
    "latency": "Reported: latency-bound, below 1 MiB",
    "expert-parallel": "Reported: expert-parallel kernels of another library",
}
ALL_OWN, ALL_SCORED = "all own H200 rows", "all scored rows"
OWN = "ours-"
"""Prefix of the ids of moesim's own measurements."""
LOCAL_EXPERTS, TOP_K, TOKENS, HIDDEN = 8, 8, 4096, 7168
"""Setup of the Hybrid-EP table (uniform router): experts per GPU, experts per token, tokens per GPU, hidden
size."""
SWEPT_EXPERTS = 256
"""Experts of the sweep of DeepEP over tokens and SMs, whose rows state their bytes."""
KERNELS = {
    "Hybrid-EP": "hybridep",
    "DeepEP low latency": "deepep-low-latency",
    "UCCL-EP low latency": "uccl-ep-low-latency",
    "UCCL-EP": "uccl-ep",
    "DeepEP": "deepep-2025-04",
}
"""Dispatchers by the beginning of a group's name; the first that fits."""


class MeasuredRow(Frozen):
    """One row of `data/published/collectives.csv`.

    `bytes`: the whole buffer (input of an all-reduce, reduce-scatter or all-to-all on one rank, output of an
    all-gather). Expert-parallel rows have communication SMs and GB/s as their source counts them, or the
    bytes of a rank's tokens and seconds.
    `note` says why a row has its class.
    """

    id: str
    use: Use
    group: str
    operation: str
    node: str
    network: str
    ranks: int | Literal[""]
    bytes: float | Literal[""]
    sms: int | Literal[""]
    measured: float | Literal[""]
    unit: Literal["s", "GB/s", ""]
    in_switch: bool
    source: str
    note: str


class CollectiveRow(Frozen):
    """A measured figure and its prediction; `relative_error` is that of the time, predicted / measured - 1.

    `unit` is s, or GB/s as the source counts them; the time's error is then measured / predicted - 1.
    """

    id: str
    use: Use
    group: str
    source: str
    unit: Literal["s", "GB/s"]
    measured: float
    predicted: float
    relative_error: float
    how: str
    """Algorithm and protocol that the model chose, or the SMs of an expert-parallel row."""


class GroupSummary(Frozen):
    """Errors of one group of rows, as fractions of the measured time."""

    use: Use
    group: str
    rows: int
    median_absolute_error: float
    signed_median_error: float
    worst_row: str
    worst_error: float


@lru_cache(maxsize=1)
def measured_rows() -> tuple[MeasuredRow, ...]:
    """Every measured row with its class; the `note` of a row without a prediction says why."""
    return tuple(TypeAdapter(list[MeasuredRow]).validate_python(published_records("collectives.csv")))


def score_collectives() -> list[CollectiveRow]:
    """Score every row that can be predicted, in the order of the file (docs/model.md, eq. X13)."""
    return [_scored(row) for row in measured_rows() if row.use in PREDICTED]


def _scored(row: MeasuredRow) -> CollectiveRow:
    assert row.ranks != "" and row.measured != "" and row.unit != ""
    if row.sms != "":
        predicted, how = _expert_parallel(row, row.ranks, row.sms), f"{row.sms} SMs, {row.note}"
        slow, fast = (predicted, row.measured) if row.unit == "s" else (row.measured, predicted)
        error = slow / fast - 1.0
    else:
        assert row.bytes != ""
        predicted, how = _predict(row, row.ranks, row.bytes)
        error = predicted / row.measured - 1.0
    return CollectiveRow(
        id=row.id,
        use=row.use,
        group=row.group,
        source=row.source,
        unit=row.unit,
        measured=row.measured,
        predicted=predicted,
        relative_error=error,
        how=how,
    )


def _predict(row: MeasuredRow, ranks: int, size: float) -> tuple[float, str]:
    topology, library = _topology(row.node, row.network, ranks), load_library()
    if row.operation == "send":
        found = neighbour_sends(size, [(i, (i + 1) % ranks) for i in range(ranks)], topology, library)
    else:
        found = collective(row.operation, size, range(ranks), topology, library, in_switch=row.in_switch)
    return found.seconds, f"{found.algorithm} {found.protocol}"


@lru_cache(maxsize=32)
def _topology(node_name: str, network_name: str, ranks: int) -> Topology:
    node = load_node(node_name)
    return build_topology(node, -(-ranks // node.n_gpus), load_network(network_name))


def _expert_parallel(row: MeasuredRow, ranks: int, sms: int) -> float:
    """Predicted GB/s as the source counts them, or seconds, of a row's kernels."""
    run = _benchmark(row, ranks, sms)
    seconds = benchmark_seconds(run)
    return seconds if row.unit == "s" else run.logical_bytes / seconds / 1e9


def _benchmark(row: MeasuredRow, ranks: int, sms: int) -> KernelBenchmark:
    wire: Format = "fp8" if row.operation.endswith("fp8") else "bf16"
    tokens, experts = float(TOKENS), LOCAL_EXPERTS * ranks
    if row.bytes != "":
        tokens, experts = row.bytes / row_bytes(HIDDEN, wire), SWEPT_EXPERTS
    return KernelBenchmark(
        "combine" if "combine" in row.operation else "dispatch",
        next(name for begin, name in KERNELS.items() if row.group.startswith(begin)),
        ranks, tokens, HIDDEN, Gate(experts, TOP_K), wire, sms, row.node, row.network,
        "generic-roofline" if "Blackwell" in row.group else "hopper-communication",
        "kernel only" if row.note.startswith("kernel only") else "torch API",
    )  # fmt: skip


def summarise(rows: Iterable[CollectiveRow]) -> list[GroupSummary]:
    """Errors by group, scored rows first, and over all of moesim's own and all scored rows."""
    found = list(rows)
    groups: dict[tuple[Use, str], list[CollectiveRow]] = {}
    for use in PREDICTED:
        for row in found:
            if row.use == use:
                groups.setdefault((use, row.group), []).append(row)
    scored = [row for row in found if row.use == "scored"]
    for name, members in ((ALL_OWN, [r for r in scored if r.id.startswith(OWN)]), (ALL_SCORED, scored)):
        if members:
            groups["scored", name] = members
    return [_summary(use, name, members) for (use, name), members in groups.items()]


def _summary(use: str, name: str, rows: list[CollectiveRow]) -> GroupSummary:
    worst = max(rows, key=lambda row: abs(row.relative_error))
    return GroupSummary.model_validate(
        {
            "use": use,
            "group": name,
            "rows": len(rows),
            "median_absolute_error": median(abs(row.relative_error) for row in rows),
            "signed_median_error": median(row.relative_error for row in rows),
            "worst_row": worst.id,
            "worst_error": worst.relative_error,
        }
    )


def as_score(row: CollectiveRow) -> Row:
    """The row in the form of the scoreboard; its error stays that of the time."""
    words = f"{row.group} ({row.use})", row.unit
    found = Row.of(f"collectives.{row.id}", row.source, words, (row.measured, row.predicted))
    return found.model_copy(update={"relative_error": row.relative_error})


def not_predicted() -> dict[tuple[Use, str], int]:
    """Number of rows without a prediction, by class and reason."""
    counts: dict[tuple[Use, str], int] = {}
    for row in measured_rows():
        if row.use not in PREDICTED:
            counts[row.use, row.note or row.group] = counts.get((row.use, row.note or row.group), 0) + 1
    return counts
