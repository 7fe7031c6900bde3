"""`read`: a trace of a file or a folder of ranks as a `StepTrace`, whatever its format."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import RecordArray
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_readable
from moesim.simulator.trace import summary
from moesim.simulator.trace.attribute import Attributed, attribute, unclassified_names
from moesim.simulator.trace.classes import CLASSES, Rules, read_rules
from moesim.simulator.trace.events import Raw
from moesim.simulator.trace.formats import read_chakra, read_h800_csv, read_nsight
from moesim.simulator.trace.kineto import UNREADABLE, opened, read_kineto

MOST_RANKS = 4096
_SEND = ("bytes", "start_ns", "end_ns", "bytes_per_s", "where")
_ENDINGS = (".json", ".json.gz", ".json.zst", ".sqlite", ".et", ".et.gz", ".csv")


class RankTrace(Struct, frozen=True):
    """One rank: its plain tables, what was derived, and its figures (see `StepTrace`)."""

    raw: Raw
    found: Attributed
    steps: list[dict[str, Any]]
    collectives: list[dict[str, Any]]

    @property
    def events(self) -> RecordArray:
        """GPU events in order of start, dtype `events.EVENT`; `rank` is filled."""
        return self.raw.events

    @property
    def names(self) -> list[str]:
        """Texts that `name`, `op`, `scope` and `shape` of the events point at."""
        return self.raw.names


class StepTrace(Struct, frozen=True):
    """A trace, read: what `trace compare` and `calibrate --from-trace` start from.

    `ranks` in order of rank number, each with its events and tables; `offsets_ns` what to add to each rank's
    clock to compare them (0 for the first); `matched` one row for every rank of every matched collective,
    with waiting and transfer in nanoseconds; `notes` all that a reader must know: breaks, what cannot be
    attributed.
    """

    source: str
    ranks: tuple[RankTrace, ...]
    offsets_ns: tuple[int, ...]
    matched: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def class_of(self, number: int) -> str:
        """The class by its number in the events."""
        return CLASSES[number]

    def table(self) -> dict[str, Any]:
        """The whole summary as plain data, as `moesim trace read --json` prints it."""
        return {
            "source": self.source,
            "ranks": [_rank_table(rank) for rank in self.ranks],
            "clock_offsets_ns": list(self.offsets_ns),
            "matched_collectives": list(self.matched[: summary.MOST_ROWS]),
            "matched_collectives_left_out": max(0, len(self.matched) - summary.MOST_ROWS),
            "notes": list(self.notes),
        }


def read(
    path: str | Path, rules: str | Path | Rules | None = None, said: Callable[[str], None] = lambda text: None
) -> StepTrace:
    """Read a trace file, or a folder with one file a rank; `rules` are the user's own, `said` hears progress.

    Raises InputError for what is no trace of GPU work: CPU only, no events, another format, hostile content.
    """
    place = Path(path)
    check_readable(place)
    own = rules if isinstance(rules, Rules) or rules is None else read_rules(Path(rules))
    raws: list[Raw] = []
    for file in _files(place):
        raws += _read_one(file, said)
    notes: list[str] = []
    _number_ranks(raws, notes)
    ranks = []
    for raw in raws:
        said(f"attributing {raw.source}")
        ranks.append(_rank(raw, own))
    ranks.sort(key=lambda rank: rank.raw.rank)
    prefix = len(ranks) > 1
    for rank in ranks:
        notes += [f"rank {rank.raw.rank}: {note}" if prefix else note for note in rank.raw.notes]
    offsets, matched = summary.align([rank.raw for rank in ranks], [rank.collectives for rank in ranks])
    _check_across(ranks, matched, notes)
    return StepTrace(place.name, tuple(ranks), tuple(offsets), tuple(matched), tuple(notes))


def fingerprints(path: str | Path) -> tuple[list[tuple[str, str]], str]:
    """Name and SHA-256 of every file of a trace, and the date of the newest (of the file, as YYYY-MM-DD).

    Raises InputError as `read` does for what cannot be opened.
    """
    found, newest = [], 0.0
    for file in _files(Path(path)):
        digest = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    digest.update(piece)
            newest = max(newest, file.stat().st_mtime)
        except OSError as error:
            raise InputError(f"{file.name}: cannot be read ({str(error)[:160]})") from None
        found.append((file.name, digest.hexdigest()))
    return found, datetime.datetime.fromtimestamp(newest, datetime.UTC).date().isoformat()


def own_rates(profile: CalibrationProfile, path: str | Path) -> str:
    """A note where a profile's rates come from a file of this very trace; else empty."""
    if profile.trace is None:
        return ""
    known = {file.sha256: file.name for file in profile.trace.files}
    same = [name for name, digest in fingerprints(path)[0] if digest in known]
    if not same:
        return ""
    return (
        f"the profile {profile.name} has its rates from {same[0]}, which is compared here: agreement "
        f"says nothing about "
        "the prediction; compare with a profile that was measured, or with another run"
    )


def _files(place: Path) -> list[Path]:
    try:
        if not place.exists():
            raise InputError(
                f"{place}: no such file or folder; give a trace or a folder with one file a rank"
            )
        if not place.is_dir():
            return [place]
        files = sorted(
            file for file in place.iterdir() if file.is_file() and file.name.lower().endswith(_ENDINGS)
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{place}: cannot be opened ({str(error)[:120]})") from None
    if not files:
        raise InputError(
            f"{place}: no trace in this folder; files that are read end in {', '.join(_ENDINGS)}"
        )
    if len(files) > MOST_RANKS:
        raise InputError(f"{place}: {len(files)} files, more than the limit of {MOST_RANKS} ranks")
    return files


def _read_one(file: Path, said: Callable[[str], None]) -> list[Raw]:
    said(f"reading {file.name}")
    try:
        if not file.is_file():
            raise InputError(f"{file.name}: not a file (a device, pipe or socket); give a trace")
        with opened(file) as stream:
            head = stream.read(4096)
        if head[:16] == b"SQLite format 3\0":
            return read_nsight(file)
        if file.name.lower().endswith(".csv"):
            return [read_h800_csv(file)]
        if head[257:262] == b"ustar":
            raise InputError(f"{file.name}: a tar archive; unpack it and give the file or the folder inside")
        if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
            return [read_kineto(file, said)]
        if file.name.lower().endswith((".et", ".et.gz")) or b"\x06schema" in head[:64]:
            return [read_chakra(file)]
    except UNREADABLE as error:
        raise InputError(f"{file.name}: cannot be read ({str(error)[:160]})") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{file.name}: holds a value that no trace holds ({str(error)[:160]})") from None
    if not head:
        raise InputError(f"{file.name}: the file is empty; a trace is expected")
    raise InputError(
        f"{file.name}: neither Kineto or Chrome JSON, nor Nsight Systems SQLite, nor a Chakra execution "
        "trace (it "
        f"begins with {head[:12]!r}); a rocprofiler or .nsys-rep file must be exported to one of these first"
    )


def _number_ranks(raws: list[Raw], notes: list[str]) -> None:
    """Give every rank its number: of the content, of the name, else by order; two of one are refused."""
    for raw in raws:
        named = re.search(r"rank[-_]?(\d{1,6})", raw.source)
        if raw.rank < 0 and named:
            raw.rank = int(named[1])
        elif named and raw.rank >= 0 and int(named[1]) != raw.rank and len(raws) > 1:
            notes.append(
                f"{raw.source}: its name says rank {named[1]}, its content rank {raw.rank}; the content "
                "is used"
            )
        if raw.world > 0 and raw.rank >= raw.world:
            raise InputError(
                f"{raw.source}: rank {raw.rank} is not below its world size {raw.world}; the file is wrong"
            )
    for n, raw in enumerate(raws):
        if raw.rank < 0:
            free = next(m for m in range(len(raws)) if all(other.rank != m for other in raws))
            raw.rank = free
            if len(raws) > 1:
                notes.append(f"file {n} ({raw.source}) does not say its rank; it counts as rank {free}")
    seen: dict[int, str] = {}
    for raw in raws:
        if raw.rank in seen:
            raise InputError(
                f"{raw.source} and {seen[raw.rank]} both are rank {raw.rank}; give one file a rank, of "
                "one run"
            )
        seen[raw.rank] = raw.source
    worlds = {raw.world for raw in raws if raw.world > 0}
    if len(worlds) > 1:
        raise InputError(
            f"world sizes {', '.join(map(str, sorted(worlds)))} in one folder: these are several runs"
        )


def _rank(raw: Raw, rules: Rules | None) -> RankTrace:
    if not len(raw.events):
        if raw.notes:
            raise InputError(f"{raw.source}: no kernel of a GPU in what could be read: {raw.notes[0]}")
        raise InputError(
            f"{raw.source}: no kernel of a GPU among its events (a trace of the CPU only, or of a profiler "
            "that is not read, such as rocprofiler); profile with ProfilerActivity.CUDA, also on AMD, and "
            "give that file"
        )
    raw.events["rank"] = raw.rank
    found = attribute(raw, rules)
    if raw.timed:
        raw.notes += summary.check_events(raw)
    _say(raw, found)
    steps = []
    for number, (name, start, end) in enumerate(summary.step_bounds(raw, found)):
        row: dict[str, Any] = {
            "number": number,
            "name": name,
            "start_ns": start,
            **summary.times(raw.events, start, end),
        }
        row["idle_by_cause_ns"] = summary.gaps(raw, start, end) if raw.timed else {}
        steps.append(row)
    return RankTrace(raw, found, steps, summary.collectives(raw))


def _say(raw: Raw, found: Attributed) -> None:
    count = len(raw.events)
    if found.replayed:
        raw.notes.append(
            f"{found.replayed} of {count} events come from graph replays: their operators, phases, "
            "layers and micro-"
            "batches cannot be attributed; their classes come from names only"
        )
    if found.unlaunched and len(raw.host):
        raw.notes.append(
            f"{found.unlaunched} of {count} events have no host call in the trace; classes by names only"
        )
    elif not len(raw.host) and not raw.classes:
        raw.notes.append("the trace has no host events: classes by kernel names only, no host gaps")
    if len(found.steps) == 1 and "no step" in found.step_method:
        raw.notes.append(found.step_method)
    lost = unclassified_names(raw)
    if lost:
        shown = "; ".join(f"{name[:60]} ({length / 1e6:.2f} ms)" for name, length in lost[:3])
        raw.notes.append(
            f"{len(lost)} kernel names are known to no rule, longest: {shown}; --rules FILE names them"
        )


def _check_across(ranks: list[RankTrace], matched: list[dict[str, Any]], notes: list[str]) -> None:
    if len(ranks) < 2:
        notes.append("one rank: communication is not split into transfer and waiting")
        return
    if not matched and any(rank.collectives for rank in ranks):
        notes.append("no collective is found on two ranks: clocks are not aligned, and waiting is not known")
    counts = [len(rank.collectives) for rank in ranks]
    if len(set(counts)) > 1:
        text = f"ranks hold different numbers of collectives ({min(counts)} to {max(counts)})"
        if not all(rank.raw.timed for rank in ranks):
            raise InputError(f"{text}: collectives are lost from these execution traces; write them again")
        notes.append(f"{text}: the kinds of which the number differs are not matched")
    apart = sum(row["transfer_ns"] == 0 < row["waiting_ns"] for row in matched)
    if apart:
        notes.append(
            f"{apart} of {len(matched)} matched collectives end on one rank before they begin on another: a"
            " clock jumps or collectives are lost, and transfer and waiting are not to be trusted"
        )
    steps = {len(rank.steps) for rank in ranks}
    if len(steps) > 1:
        notes.append(
            f"ranks hold {min(steps)} to {max(steps)} steps: they were not profiled over the same steps"
        )


def _rank_table(rank: RankTrace) -> dict[str, Any]:
    raw, found = rank.raw, rank.found
    start, end = int(raw.events["start"].min()), int(raw.events["end"].max())
    layers = raw.events["layer"]
    sends = [row for row in rank.collectives if row["class"] == "send_recv"]
    return {
        "rank": raw.rank, "source": raw.source, "gpu": raw.gpu, "events": len(raw.events),
        "how": {
            "steps": found.step_method, "phases": found.phase_method,
            "layers": found.layer_method or "not known",
            "microbatches": found.microbatch_method or "not known",
        },
        "whole": summary.times(raw.events, start, end),
        "steps": rank.steps,
        "coverage": summary.coverage(raw.events),
        "classes": summary.by_class(raw.events),
        "layers": _grouped(raw, "layer"),
        "microbatches": _grouped(raw, "microbatch"),
        "gemms": summary.gemms(raw)[:200],
        "communication": _communication(rank),
        "sends": [{key: row[key] for key in _SEND} for row in sends[:500]],
        "layers_known_share": float(np.mean(layers >= 0)),
        "graph_replay_events": found.replayed,
    }  # fmt: skip


def _grouped(raw: Raw, key: str) -> list[dict[str, Any]]:
    length = raw.events["end"] - raw.events["start"]
    rows = []
    for number in np.unique(raw.events[key]).tolist():
        own = raw.events[key] == number
        if number >= 0:
            rows.append({key: number, "ns": int(length[own].sum()), "events": int(own.sum())})
    return rows


def _communication(rank: RankTrace) -> list[dict[str, Any]]:
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rank.collectives:
        key = (row["class"], row["where"])
        into = table.setdefault(
            key, {"class": key[0], "where": key[1], "events": 0, "ns": 0, "bytes": 0, "known": 0}
        )
        into["events"] += 1
        into["ns"] += row["end_ns"] - row["start_ns"]
        if row["bytes"] > 0:
            into["bytes"] += row["bytes"]
            into["known"] += row["end_ns"] - row["start_ns"]
    for row in table.values():
        known = row.pop("known")
        row["bytes_per_s"] = row["bytes"] / known * 1e9 if known else None
    return sorted(table.values(), key=lambda row: -row["ns"])
