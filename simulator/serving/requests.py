"""Requests as arrays: read from logs, or drawn from a rate; times are integer nanoseconds after the first."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_readable
from moesim.simulator.scenario.serving import ServingLoad

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
LONGEST_NS = 30 * 365 * 86_400 * NS_PER_S
"""Longest load."""


class Requests(Struct, frozen=True):
    """Requests in order of arrival.

    `arrival_ns`, `input_tokens`, `output_tokens`: one entry a request. `block_ids` of request i are
    `blocks[first_block[i]:first_block[i + 1]]`: equal ids are equal prefixes of `block_tokens` tokens a
    block; `block_tokens` is 0 where the log has none. `cached_share` of every prompt is in a cache elsewhere.
    """

    arrival_ns: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    blocks: IntArray
    first_block: IntArray
    block_tokens: int = 0
    cached_share: float = 0.0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.arrival_ns)

    def block_ids(self, request: int) -> list[int]:
        """Ids of a request's prompt blocks, in order."""
        ids: list[int] = self.blocks[self.first_block[request] : self.first_block[request + 1]].tolist()
        return ids

    def some(self, places: IntArray) -> Requests:
        """The requests at these places, in this order."""
        counts = np.diff(self.first_block)[places]
        ids = [
            self.blocks[self.first_block[i] : self.first_block[i + 1]] for i in places if self.block_tokens
        ]
        return Requests(
            self.arrival_ns[places],
            self.input_tokens[places],
            self.output_tokens[places],
            np.concatenate(ids) if ids else self.blocks[:0],
            np.concatenate(([0], np.cumsum(counts))),
            self.block_tokens,
            self.cached_share,
            self.notes,
        )

    def at_rate(self, requests_per_s: float) -> Requests:
        """The same requests, stretched in time to a mean number of arrivals a second."""
        span = int(self.arrival_ns[-1])
        if not span:
            raise InputError("the load's requests come at one moment, so that no rate can be given to them")
        factor = (len(self) - 1) * NS_PER_S / span / requests_per_s
        return replace(
            self,
            arrival_ns=_within_a_lifetime(
                np.multiply(self.arrival_ns, factor, dtype=np.float64), requests_per_s
            ),
        )


def requests_of(
    arrival_ns: Any,
    input_tokens: Any,
    output_tokens: Any,
    blocks: list[list[int]] | None = None,
    block_tokens: int = 0,
) -> Requests:
    """Requests sorted by arrival (equal times keep their order), the first at zero.

    Raises InputError for what is no list of whole numbers, lists of different lengths, lengths below one
    token, and ids that do not cover the prompt.
    """
    arrival, inputs, outputs = (
        _whole_numbers(name, numbers)
        for name, numbers in (
            ("arrival_ns", arrival_ns), ("input_tokens", input_tokens), ("output_tokens", output_tokens)
        )
    )  # fmt: skip
    if not len(arrival) == len(inputs) == len(outputs):
        raise InputError(
            f"{len(arrival)} arrivals, {len(inputs)} prompts and {len(outputs)} answers are no load; give "
            "one of each for a request"
        )
    if len(arrival) == 0:
        raise InputError("the load has no requests; state a log with at least one, or a rate and a number")
    for name, lengths in (("input", inputs), ("output", outputs)):
        if (bad := np.flatnonzero(lengths < 1)).size:
            raise InputError(
                f"request {bad[0] + 1} of the load has {lengths[bad[0]]} {name} tokens; 1 is the least"
            )
    order = np.argsort(arrival, kind="stable")
    late = int((np.diff(arrival) < 0).sum())
    sorted_note = f"{late} requests of the load came before the one above them; they were sorted by time"
    ids = [blocks[i] for i in order] if blocks is not None else []
    for place, row in zip(order, ids, strict=False):
        if len(row) != -(-inputs[place] // block_tokens):
            raise InputError(
                f"request {place + 1} of the log has {len(row)} blocks of {block_tokens} tokens for "
                f"{inputs[place]} input tokens; state the log's own `block_tokens`"
            )
        if len(set(row)) < len(row):
            raise InputError(
                f"request {place + 1} of the log has a block id twice; an id stands for its tokens and all "
                "before them, so that none comes twice in a prompt"
            )
    counts = np.array([len(row) for row in ids] or np.zeros(len(arrival)), dtype=np.int64)
    return Requests(
        arrival_ns=arrival[order] - arrival[order[0]],
        input_tokens=inputs[order],
        output_tokens=outputs[order],
        blocks=np.array([one for row in ids for one in row], dtype=np.int64),
        first_block=np.concatenate(([0], np.cumsum(counts))),
        block_tokens=block_tokens if blocks is not None else 0,
        notes=((sorted_note,) if late else ()) + _gap_notes(arrival[order]),
    )


def _whole_numbers(name: str, numbers: Any) -> IntArray:
    """A list of whole numbers as an array; raises InputError for anything else."""
    found = np.asarray(numbers)
    if found.ndim == 1 and found.size == 0:
        return np.zeros(0, dtype=np.int64)
    if found.ndim == 1 and found.dtype.kind in "iuf":
        inside = (found >= -MOST) & (found <= MOST)  # false for NaN
        whole = inside & (found == np.rint(found))
        if whole.all():
            return found.astype(np.int64)
        at = int(np.flatnonzero(~whole)[0])
        raise InputError(f"{name} of request {at + 1} is {found[at]}; it is a whole number below 2^62")
    raise InputError(f"{name} is {str(numbers)[:60]}; it is a list of whole numbers")


def _gap_notes(arrival: IntArray) -> tuple[str, ...]:
    """Say where nothing comes for a minute and for a hundred usual gaps, as where a log was not kept."""
    if len(arrival) < 3:
        return ()
    gaps = np.diff(arrival)
    longest = int(gaps.argmax())
    usual = max(int(np.median(gaps)), 1)
    if gaps[longest] < max(60 * NS_PER_S, 100 * usual):
        return ()
    return (
        f"no request comes for {gaps[longest] / NS_PER_S:,.0f} s after request {longest + 1}, and the usual "
        f"gap is {usual / NS_PER_S:.3g} s: rates count this time, so cut the log if it was not kept",
    )


# -- logs --------------------------------------------------------------------------------------------
# Mooncake's JSON lines, Azure's CSV, and a plain CSV with the columns arrival_s, input_tokens, output_tokens.

MOONCAKE_BLOCK_TOKENS = 512
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_PLAIN = ("arrival_s", "input_tokens", "output_tokens")


def read_log(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Requests:
    """Requests of a log, plain, gzipped or xz; `block_tokens` are those of a block of Mooncake's `hash_ids`.

    Raises InputError with the line of what cannot be read; times out of order are sorted.
    """
    check_readable(path)
    try:
        raw = _unpacked(path)
        if len(raw) > MOST_BYTES:
            raise InputError(f"{path}: more than {MOST_BYTES:,} bytes of text; cut the log into several")
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as problem:
        raise InputError(f"{path}: cannot be read as a log of requests: {problem}") from None
    read = partial(_mooncake, block_tokens=block_tokens) if text.lstrip().startswith("{") else _table
    try:
        return read(path, text)
    except csv.Error as problem:
        raise InputError(f"{path}: cannot be read as a log of requests: {problem}") from None


MOST_BYTES = 1 << 30
"""Most bytes of a log, unpacked: twice those of ten million requests."""


def _unpacked(path: Path) -> bytes:
    """The first bytes of a log, one more than `MOST_BYTES` at most."""
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        unpack = (
            gzip.open if magic.startswith(b"\x1f\x8b") else lzma.open if magic == b"\xfd7zXZ\x00" else None
        )
        if unpack is None:
            return file.read(MOST_BYTES + 1)
        with unpack(file) as packed:
            return bytes(packed.read(MOST_BYTES + 1))


def _mooncake(path: Path, text: str, block_tokens: int) -> Requests:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append({
                "timestamp": _whole(row["timestamp"], NS_PER_MS),
                "input_length": _whole(row["input_length"]),
                "output_length": _whole(row["output_length"]),
                "ids": [_whole(one) for one in row.get("hash_ids") or ()],
            })  # fmt: skip
            _check_lengths(path, number, rows[-1]["input_length"], rows[-1]["output_length"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
            raise InputError(
                f"{path}, line {number}: {line[:60]!r} is not a request: {problem}; every line needs "
                "`timestamp` in ms, `input_length`, `output_length`, and may have `hash_ids`"
            ) from None
    with_ids = any(row["ids"] for row in rows)
    if with_ids and (gap := next((n for n, row in enumerate(rows, 1) if not row["ids"]), 0)):
        raise InputError(
            f"{path}, line {gap} has no `hash_ids`, and others have; give them to all lines or to none"
        )
    return requests_of(
        [row["timestamp"] for row in rows],
        [row["input_length"] for row in rows],
        [row["output_length"] for row in rows],
        [row["ids"] for row in rows] if with_ids else None,
        block_tokens,
    )


MOST = (1 << 62) - 1
"""Bound of numbers in a log: the sum of two is below 64 bits."""


def _whole(number: Any, scale: int = 1) -> int:
    """A number of a log times `scale`, rounded; raises TypeError for no number, ValueError beyond `MOST`."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{number!r} is not a number")
    if abs(whole := round(number * scale)) > MOST:
        raise ValueError(f"{number} is too large")
    return whole


def _table(path: Path, text: str) -> Requests:
    reader = csv.DictReader(io.StringIO(text))
    reader.fieldnames = names = [str(name).strip() for name in reader.fieldnames or ()]
    columns = next((each for each in (_AZURE, _PLAIN) if set(each) <= set(names)), None)
    if columns is None:
        raise InputError(
            f"{path}: its columns are {', '.join(names) or 'none'}; a log has {', '.join(_PLAIN)}, or "
            f"Azure's {', '.join(_AZURE)}, or is Mooncake's JSON lines"
        )
    if twice := sorted({name for name in columns if names.count(name) > 1}):
        raise InputError(f"{path}: it has the column {twice[0]} more than once; leave one of them")
    rows = list(_rows(path, reader, columns))
    if not rows:
        raise InputError(f"{path}: it has a head and no requests; a log has at least one")
    unread = [name for name in names if name not in columns]
    times, inputs, outputs = ([row[at] for row in rows] for at in range(3))
    requests = requests_of(times, inputs, outputs)
    note = f"columns of the log that are not read: {', '.join(unread)}"
    return replace(requests, notes=(*requests.notes, note)) if unread else requests


def _rows(
    path: Path, reader: csv.DictReader[str], columns: tuple[str, ...]
) -> Iterator[tuple[int, int, int]]:
    moment = _instant_ns if columns is _AZURE else lambda word: _whole(float(word), NS_PER_S)
    for row in reader:
        words = [(row[name] or "").strip() for name in columns]
        if None in row:
            raise InputError(f"{path}, line {reader.line_num}: it has more fields than the head names")
        try:
            time, inputs, outputs = moment(words[0]), _whole(int(words[1])), _whole(int(words[2]))
        except (ValueError, OverflowError):
            raise InputError(
                f"{path}, line {reader.line_num}: {', '.join(words)} is no time and two whole numbers"
            ) from None
        _check_lengths(path, reader.line_num, inputs, outputs)
        yield time, inputs, outputs


def _check_lengths(path: Path, line: int, inputs: int, outputs: int) -> None:
    for name, length in (("input", inputs), ("output", outputs)):
        if length < 1:
            raise InputError(
                f"{path}, line {line}: a request has {length} {name} tokens; 1 is the least, so leave it out"
            )


_INSTANT = re.compile(r"([-\d]+[ T][:\d]+)(?:\.(\d+))?(Z|[-+]\d\d:\d\d)?")


def _instant_ns(word: str) -> int:
    """Nanoseconds of `2023-11-16 18:15:46.6805900` (UTC): seven digits, which datetime cuts to six.

    The log of 2024 has an offset behind them.
    """
    if not (parts := _INSTANT.fullmatch(word)):
        raise ValueError
    date, fraction, offset = parts.groups()
    seconds = datetime.fromisoformat(date + (offset or "+00:00").replace("Z", "+00:00")).timestamp()
    return _whole(int(seconds), NS_PER_S) + int((fraction or "0").ljust(9, "0")[:9])


# -- drawn loads -------------------------------------------------------------------------------------


def arrivals(requests_per_s: float, count: int, seed: int, burstiness: float = 1.0) -> IntArray:
    """Arrival times in ns of a renewal process with gamma gaps.

    `burstiness` is the squared coefficient of variation of the gaps: 1 is Poisson, above 1 comes in bursts,
    0 is a fixed interval (the meaning of `1 / burstiness` in vLLM's benchmark). Raises InputError for a rate
    of 0.
    """
    if not requests_per_s > 0 or burstiness < 0:
        raise InputError(
            f"arrivals at {requests_per_s:g} a second with burstiness {burstiness:g}: the rate is above 0, "
            "the burstiness 0 or more"
        )
    mean_ns = min(NS_PER_S / requests_per_s, LONGEST_NS)
    if burstiness == 0:
        gaps = np.full(count, mean_ns)
    else:
        gaps = np.random.default_rng(seed).gamma(1 / burstiness, burstiness * mean_ns, count)
    ends = np.cumsum(gaps)
    return _within_a_lifetime(ends - ends[0], requests_per_s)


def _within_a_lifetime(times: FloatArray, requests_per_s: float) -> IntArray:
    """Whole nanoseconds; raises InputError where the last request comes after decades."""
    if not times[-1] < LONGEST_NS:
        raise InputError(
            f"serving.load.rate_per_s={requests_per_s:g}: {len(times):,} requests would take more than "
            "30 years; state a higher rate"
        )
    return np.rint(times).astype(np.int64)


def repeated(log: Requests, count: int, seed: int) -> Requests:
    """A log repeated until it has `count` requests, each time in the span of the log with other times.

    A request keeps its lengths and blocks; its time moves by a uniform draw of up to one mean gap either way.
    Repeats of one log start at the same moment, so that a load of n times the log is n times as dense.
    """
    whole, span = len(log), int(log.arrival_ns[-1])
    place = np.arange(count) % whole
    gap = max(span // max(whole - 1, 1), 1)
    jitter = np.random.default_rng(seed).integers(-gap, gap, count, endpoint=True)
    jitter[:whole] = 0
    times = np.clip(log.arrival_ns[place] + jitter, 0, span)
    order = np.argsort(times, kind="stable")
    return replace(log.some(place[order]), arrival_ns=times[order] - times[order[0]])


DRAWN = 1000
"""Requests of a drawn load that states no number."""


def load_requests(load: ServingLoad, seed: int, find: Callable[[str], str] = str) -> Requests:
    """The requests of a scenario's load; `find` gives the path of its log.

    Raises InputError for a log that cannot be read, and for a load with neither log nor rate nor concurrency.
    """
    if load.log is not None:
        log = read_log(Path(find(load.log)), load.block_tokens)
        count = load.requests or len(log)
        chosen = log.some(np.arange(count)) if count <= len(log) else repeated(log, count, seed)
        kept = tuple(note for note in log.notes if note not in _gap_notes(log.arrival_ns))
        chosen = replace(chosen, notes=kept + _gap_notes(chosen.arrival_ns))
        return chosen if load.rate_per_s is None else chosen.at_rate(load.rate_per_s)
    count = load.requests or DRAWN
    if load.arrivals == "concurrency":
        times = np.zeros(count, dtype=np.int64)
    elif load.rate_per_s is None:
        raise InputError(
            "serving.load says neither when requests come nor how many are under way: state rate_per_s, log, "
            "or arrivals: concurrency with concurrency"
        )
    else:
        spread = {"even": 0.0, "poisson": 1.0, "bursts": load.burstiness}[load.arrivals]
        times = arrivals(load.rate_per_s, count, seed, spread)
    draws = np.random.default_rng([seed, 1])
    inputs = drawn_lengths(load.input_tokens, load.length_spread, count, draws)
    outputs = drawn_lengths(load.output_tokens, load.length_spread, count, draws)
    return replace(requests_of(times, inputs, outputs), cached_share=load.cached_share)


def drawn_lengths(mean: int, spread: float, count: int, draws: np.random.Generator) -> IntArray:
    """Log-normal lengths with a mean, at least 1; `spread`: standard deviation of their logarithm."""
    if not spread:
        return np.full(count, mean, dtype=np.int64)
    drawn = mean * np.exp(spread * draws.standard_normal(count) - spread**2 / 2)
    lengths: IntArray = np.maximum(np.rint(drawn), 1).astype(np.int64)
    return lengths
