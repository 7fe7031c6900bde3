"""Scores published restarts, blocking times and goodputs of large runs; none of them fed a constant."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.failure import load_failure_rate, load_restart, load_storage
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.units import SECONDS_PER_DAY
from moesim.hwmodels.validation import validate_model
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.run.events import NS, simulate_events
from moesim.simulator.run.failures import (
    FailureModel,
    Groups,
    Stop,
    Tier,
    expected_wall_s,
    optimal_interval_s,
)
from moesim.simulator.run.simulate_run import interruptions
from moesim.simulator.scenario.run_plan import OPTIMAL, RunPlan
from moesim.simulator.scoring import file_records, published_records

REPLICAS = 20
RELIABILITY = "reliability-rows.csv"
RELIABILITY_COLUMNS = frozenset(
    ("source", "system", "model", "n_gpus", "conditions", "metric", "unit", "value", "use")
)
WITHIN_SHARE, WITHIN_POINTS = 0.30, 3.0
"""How far a judged time (relative) and a judged percentage (points) may be off."""
FAULTS, OTHER_FAULTS = "llama3-16k-h100", "meta-rsc1"
GPUS_A_NODE, BYTEDANCE_GPUS_A_NODE = 8, 16
BYTES_A_PARAMETER = 12.0
"""FP32 master weights and moments, as Megatron keeps them."""
PEER_BYTES_PER_S, HOST_BYTES_PER_S = 50e9, 63e9
"""NIC and host link of an H100, for rows that do not say what they ran on."""
TOLERANT_GROUPS = 128
METHODS = {"requeue": "requeued", "reschedul": "rescheduled", "standby": "warm", "oracle": "warm",
           "in-place": "in place", "hot update": "in place"}  # fmt: skip
"""How a job comes back, by words of the row's conditions."""


class ReliabilityRow(Frozen):
    """A published restart, blocking time or goodput beside its prediction.

    `error`: relative, or in points for a percentage. `judged`: whether the source states what the prediction
    needs. `basis`: what it stands on, or why there is none.
    """

    source: str
    quantity: str
    n_gpus: int | None
    unit: str
    published: float
    predicted: float | None
    error: float | None
    judged: bool
    within: bool | None
    basis: str


def reliability_rows(file: Path | None = None) -> list[ReliabilityRow]:
    """Score the outcome rows of the shipped table or of a file with the same columns.

    Raises InputError for a value that is no number.
    """
    records = published_records(RELIABILITY) if file is None else file_records(file)
    stalls = {r["conditions"]: _number(r, "value") * 60.0 for r in records if r["metric"] == "stall_time"}
    return [_reliability_row(r, stalls) for r in records if r["use"] == "outcome"]


def _number(record: Mapping[str, str], key: str) -> float:
    try:
        value = float(record[key])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{record['source']}, {record['conditions']}: {key}={record[key]!r} is no number")
    return value


def _reliability_row(record: Mapping[str, str], stalls: Mapping[str, float]) -> ReliabilityRow:
    published = _number(record, "value")
    gpus = int(_number(record, "n_gpus")) if record["n_gpus"].strip() else None
    predicted, judged, basis = _predicted(record, gpus, stalls)
    error = within = None
    if predicted is not None:
        points = record["unit"].startswith("%")
        error = predicted - published if points else predicted / published - 1.0
        within = abs(error) <= (WITHIN_POINTS if points else WITHIN_SHARE) if judged else None
    return ReliabilityRow(
        source=record["source"].split(",")[0],
        quantity=f"{record['metric'].replace('_', ' ')}: {record['model']}, {record['conditions']}",
        n_gpus=gpus, unit=record["unit"], published=published, predicted=predicted, error=error,
        judged=judged and predicted is not None, within=within, basis=basis,
    )  # fmt: skip


Prediction = tuple[float | None, bool, str]


def _predicted(record: Mapping[str, str], gpus: int | None, stalls: Mapping[str, float]) -> Prediction:
    """(prediction, whether its inputs are stated, what it stands on or why there is none)."""
    metric, words = record["metric"], record["conditions"].lower()
    if metric == "restart_time" and gpus is not None:
        return _restart_time(record, gpus, words)
    if metric == "init_time":
        size = gpus or _thousands(words)
        parts = load_restart("by-parts").parts
        if size and parts is not None:
            return size * parts.communicators.value, True, "2.7 ms a GPU, for all groups of a training job"
    if metric == "blocking_time" and gpus is not None:
        return _blocking_time(record, gpus, words)
    if metric == "relative_MFU":
        return None, False, "the step time is not stated"
    if metric == "mean_time_between_failures" and gpus is not None:
        minutes, other = (
            load_failure_rate(name).mean_time_between_s(gpus // GPUS_A_NODE) / 60.0
            for name in (FAULTS, OTHER_FAULTS)
        )
        return minutes, False, f"rate {FAULTS}; {other:.1f} with {OTHER_FAULTS}; the cards are not stated"
    if metric == "effective_training_time":
        return _effective_time(gpus or 98_304, words, stalls)
    return None, False, "neither failure rate, restart nor length of the jobs is stated"


def _thousands(words: str) -> int:
    found = re.search(r"(\d+)k gpus", words)
    return int(found[1]) * 1024 if found else 0


def _restart_time(record: Mapping[str, str], gpus: int, words: str) -> Prediction:
    parts = load_restart("by-parts").parts
    how = next((how for word, how in METHODS.items() if word in words), None)
    if parts is None or how is None:
        return None, False, "this way to restart is not in the model"
    each = BYTEDANCE_GPUS_A_NODE if record["system"].startswith("ByteDance") else GPUS_A_NODE
    seconds = parts.seconds(gpus // each, gpus, 0.0, how)
    return (
        seconds.total - seconds.isolation, True,
        f"restart by-parts, {how}, without isolation and loading; machines of {each} GPUs",
    )  # fmt: skip


def _blocking_time(record: Mapping[str, str], gpus: int, words: str) -> Prediction:
    found = re.match(r"(\d+(?:\.\d+)?)B", record["model"])
    if found is None:
        return None, False, "the size of the model is not stated"
    size = float(found[1]) * 1e9 * BYTES_A_PARAMETER
    if "megatron" in words:
        write = load_storage("deepseek-3fs").write_bytes_per_s(gpus // BYTEDANCE_GPUS_A_NODE)
        return size / write, False, "a write to 3FS; the storage and the plan are not stated"
    if "memory" in words:
        return size / gpus / PEER_BYTES_PER_S, False, "a copy over an H100's NIC; the cards are not stated"
    return size / gpus / HOST_BYTES_PER_S, False, "a copy over an H100's host link; the cards are not stated"


def _effective_time(gpus: int, words: str, stalls: Mapping[str, float]) -> Prediction:
    """Goodput in % of Llama 3 405B on so many GPUs, with the stall that the source states."""
    tolerant = "synchronous" not in words
    stall = next((s for name, s in stalls.items() if ("synchronous" in name) != tolerant), None)
    if stall is None:
        return None, False, "the stall of a recovery is not stated"
    write = 405e9 * BYTES_A_PARAMETER / load_storage("deepseek-3fs").write_bytes_per_s(gpus // GPUS_A_NODE)
    shares = []
    for name in (FAULTS, OTHER_FAULTS):
        between = load_failure_rate(name).mean_time_between_s(gpus // GPUS_A_NODE)
        tier = Tier(interval_s=optimal_interval_s(write, between), stall_s=write)
        stop = Stop("any", 1.0 / between, 0.0, stall)
        model = FailureModel((stop,), (tier,))
        if tolerant:
            nodes = gpus // GPUS_A_NODE // TOLERANT_GROUPS
            parts = load_restart("by-parts")
            back = parts.recovery_s(nodes, nodes * GPUS_A_NODE, 0.0, "rescheduled")
            groups = Groups(TOLERANT_GROUPS, 1, True, nodes, stall_s=stall)
            model = FailureModel((replace(stop, restart_s=back),), (Tier(),), groups=groups)
        work = 30 * SECONDS_PER_DAY
        shares.append(100.0 * work / expected_wall_s([work], model))
    what = f"{TOLERANT_GROUPS} groups" if tolerant else "checkpoints of 405B at the best interval to 3FS"
    basis = f"the stated stall, rate {FAULTS}, {what}; {shares[1]:.1f} with {OTHER_FAULTS}"
    return shares[0], False, f"{basis}; cards, model and checkpoints are not stated"


class LlamaRow(Frozen):
    """Llama 3 on 16,384 H100 in 54 days by one failure rate: stops and effective training time."""

    rate: str
    kind: Literal["identity", "prediction"]
    stops: float
    goodput: float


def llama_rows() -> list[LlamaRow]:
    """The 419 stops of Llama 3 from its own table (an identity), and from rates of RSC (predictions).

    The effective time has restarts by parts and checkpoints at the best interval to Tectonic.
    """
    rows = []
    cluster = load_cluster("h100-1024").model_copy(update={"nodes": 2048})
    for name in (FAULTS, OTHER_FAULTS, "meta-rsc2", "meta-rsc1-1024-gpu-jobs"):
        keys = {"tokens": 15.6e12, "failures": name, "restart": "by-parts",
                "checkpoint": {"interval": OPTIMAL, "storage": "llama3-tectonic"}}  # fmt: skip
        plan = validate_model(RunPlan, keys, "llama")
        stops = interruptions(plan, cluster, 405_000_000_000, PRECISIONS["bf16"])
        work = 54 * SECONDS_PER_DAY
        share = work / stops.expected_seconds([work])
        runs = simulate_events([work * share], stops.model, REPLICAS, seed=0)
        wall = math.fsum(run.wall_ns[0] / NS for run in runs)
        count = sum(sum(run.stops.values()) for run in runs)
        standing = math.fsum(run.seconds("detection") for run in runs)  # in which the model has no faults
        kind: Literal["identity", "prediction"] = "identity" if name == FAULTS else "prediction"
        rows.append(
            LlamaRow(rate=name, kind=kind, stops=count / (wall - standing) * work,
                     goodput=work * share * REPLICAS / wall)
        )  # fmt: skip
    return rows
