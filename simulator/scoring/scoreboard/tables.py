"""Reads others' tables of measured steps as open rows: each row is read, or says why it cannot be."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import get_args

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.counts import flop_per_token
from moesim.simulator.scoring import file_records
from moesim.simulator.scoring.scoreboard.plan import machine_of
from moesim.simulator.scoring.scoreboard.rows import HARDWARE_FLOPS, Metric, OpenRow
from moesim.simulator.scoring.scoreboard.shapes import families, shape_of
from moesim.simulator.scoring.scoreboard.words import (
    Read,
    column_of,
    degrees_of,
    model_key,
    plain,
    read_number,
    read_unit,
    read_word,
    spellings,
)

NEEDED = ("hardware", "model", "value")
"""Columns without which a table is none of training steps; `value` may be called by its unit."""
INTEGERS = (
    "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "n_experts", "topk", "seq", "n_gpus", "tp", "pp",
    "vpp", "cp", "ep", "dp", "gbs_seqs", "mbs",
)  # fmt: skip
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "dp")
WORDS = ("hardware", "precision", "recompute", "schedule")
UNSTATED = (
    "",
    "-",
    "--",
    "\u2014",
    "\u2013",
    "?",
    "unknown",
    "not stated",
    "tbd",
    "nan",
    "null",
    "unspecified",
)
COMPLETE = {
    "yes": "yes", "true": "yes", "1": "yes", "": "yes", "partial": "partial", "no": "no", "false": "no",
    "0": "no",
}  # fmt: skip
CLOSE = 0.8
"""Likeness from which a header is a misspelt column."""
OURS = re.compile(r"fsdp2? shard=\d+(?: x dp \d+ \(JAX\))?")
"""Words of sharding with degrees that shipped rows use."""
CAUSAL, FULL = (
    re.compile(r"(?<!non-)(?<!non )\bcausal\b", re.I),
    re.compile(r"\bfull[- ]attention|non-? ?causal", re.I),
)
"""Conventions of the FLOPs of attention in the notes of a row."""
WITH_UNIT = re.compile(r"(.*?\d[\d.,]* ?[kM]?) ?([a-zA-Z/][a-zA-Z/ .]*)")
"""A value that repeats its unit."""
TEXTS = ("id", "source", "notes", "group", "n_params_b", "n_active_b")


def is_table(columns: Iterable[str]) -> bool:
    """Whether headers are those of a table of training steps."""
    return {*NEEDED} <= _columns(list(columns), "").keys()


def read_rows(file: Path) -> tuple[OpenRow, ...]:
    """The rows of a table, in its order. Raises InputError for a table whose columns or ids are unclear."""
    records = file_records(file)
    columns = _columns(list(records[0]), file.name)
    ids = Counter(record[columns["id"]].strip() for record in records) if "id" in columns else Counter()
    twice = [id_ for id_, times in ids.items() if id_ and times > 1]
    if twice:
        raise InputError(
            f"{file.name}: {len(twice)} ids are there more than once, such as {twice[0]!r}; every row "
            "needs its own"
        )
    unknown = [header for header in records[0] if header not in columns.values()]
    notes = tuple(f"the column {header!r} is not read" for header in unknown)
    rows = []
    for n, record in enumerate(records, 1):
        cells = {column: record[header] for column, header in columns.items()}
        if "metric" not in columns:
            cells["metric"] = columns["value"]
        if cells.get("zero_or_fsdp", "").strip().isdigit() and columns["zero_or_fsdp"] != "zero_or_fsdp":
            cells["zero_or_fsdp"] = f"{columns['zero_or_fsdp']}={cells['zero_or_fsdp']}"
        rows.append(read_row(cells, cells.get("id", "").strip() or f"row {n}", notes))
    return tuple(rows)


def _columns(headers: list[str], place: str) -> dict[str, str]:
    """Header of every column that a table has. Raises InputError where two name one, or one is misspelt."""
    found: dict[str, str] = {}
    own = list(spellings().columns)
    for header in headers:
        column = header if header in own else column_of(header)
        if column in own and column not in found:
            found[column] = header
        elif column in own and place and header not in own:
            raise InputError(
                f"{place}: {found[column]!r} and {header!r} both mean the column {column}; leave one out"
            )
        elif (
            place
            and difflib.get_close_matches(plain(header), own, n=1, cutoff=CLOSE)
            and not _is_unit(header)
        ):
            raise InputError(
                f"{place}: unknown column {header!r}{nearest(header, own)}; known: {', '.join(own)}"
            )
    if "value" not in found:
        units = [header for header in headers if header not in found.values() and _is_unit(header)]
        order = list(get_args(Metric))
        if units:
            found["value"] = min(units, key=lambda header: order.index(read_unit(header).is_))
            found.pop("metric", None)
    return found


def _is_unit(header: str) -> bool:
    try:
        read_unit(header)
    except ValueError:
        return False
    return True


# -- rows -------------------------------------------------------------------------------------------------


def read_row(cells: Mapping[str, str], id_: str, notes: tuple[str, ...] = ()) -> OpenRow:
    """A row from cells by column; what cannot be read is said in `unread`."""
    problems: list[str] = []
    remarks = list(notes)
    text = {c: "" if (t := cells.get(c, "").strip()).lower() in UNSTATED else t for c in spellings().columns}
    values: dict[str, object] = {**{c: text[c] for c in TEXTS}, "id": id_}

    def take(read: Read) -> str:
        remarks.extend(read.notes)
        if read.problem:
            problems.append(read.problem)
        return read.word

    numbers = {c: _integer(c, text[c], problems) for c in INTEGERS}
    model = model_named(text["model"])
    values.update({c: take(read_word(c, text[c])) for c in WORDS})
    values["zero_or_fsdp"] = take(_sharding(text["zero_or_fsdp"], numbers, problems))
    values |= {"model": model, "arch": _arch(model, text["arch"], numbers["n_experts"], problems)}
    if values["arch"] == "dense" and values["recompute"] == "selective (layernorm, moe_act)":
        values["recompute"] = "selective"
    _measured(values, text, numbers, problems)
    complete = COMPLETE.get(text["complete"].lower())
    if complete is None:
        problems.append(f"complete={text['complete']!r} is none of yes, partial, no")
    values |= {"complete": complete or "no", "group": text["group"] or f"{model} {values['hardware']}"}
    row = OpenRow.model_validate(
        values | numbers | {"remarks": tuple(remarks), "unread": "; ".join(problems)}
    )
    return row if problems else _with_step(row)


def _integer(column: str, text: str, problems: list[str]) -> int:
    degree = column in DEGREES or column == "mbs"
    if text == "" or text.lower() in ("n/a", "na", "none", "no"):
        return 1 if column in DEGREES[:4] else 0
    thousand = 1024.0 if column in ("seq", "gbs_seqs") else math.nan
    units = ("gpus", "gpu", "layers", "experts", "tokens", "sequences", "samples", "b", "x")
    try:
        if degree and re.match(r"[a-z]", text, re.I):
            return next(iter(degrees_of(text)[0].values()), 0) or read_int(text)
        number = read_number(text, thousand=thousand, units=units)
    except ValueError as error:
        problems.append(f"{column}: {error}")
        return 1
    if not (number == number and number % 1 == 0 and 0 <= number < 2**31) or (
        column == "n_gpus" and not number
    ):
        problems.append(f"{column}={text!r} is no whole number from 0 (1 GPU) to 2^31")
        return 1
    return int(number) or (1 if column in DEGREES[:4] else 0)


def read_int(text: str) -> int:
    """The whole number of a text; raises ValueError for any other."""
    return int(read_number(text))


def _arch(model: str, text: str, experts: int, problems: list[str]) -> str:
    """Dense or moe, as stated, else as the model or its experts say."""
    word = plain(text)
    if word:
        if "moe" in word.split() or word in ("mixture of experts", "sparse", "sparse moe"):
            return "moe"
        if word in ("dense", "gpt", "transformer", "decoder", "llama"):
            return "dense"
        problems.append(f"arch={text!r} is neither dense nor moe")
    return _archs().get(model, "moe" if experts > 1 else "dense")


def _measured(
    values: dict[str, object], text: Mapping[str, str], numbers: Mapping[str, int], problems: list[str]
) -> None:
    """Write the metric and the value, in the units of the open rows, into `values`."""
    values |= {"metric": "step_s", "value": 1.0}
    try:
        unit = read_unit(text["metric"])
        number, own = text["value"], WITH_UNIT.fullmatch(text["value"])
        if own and own.group(2).lower() not in ("k", "m"):
            number = own.group(1)
            if read_unit(own.group(2)) != unit:
                raise ValueError(f"{text['value']!r} has another unit than the metric {text['metric']!r}")
        value = read_number(number, units=("%",) if unit.is_ == "mfu" else ())
    except ValueError as error:
        problems.append(str(error) if "metric" in str(error) else f"value: {error}")
        return
    value *= unit.times * (numbers["seq"] if unit.times_sequence else 1)
    value /= numbers["n_gpus"] or 1 if unit.over else 1
    if not 0.0 < value < math.inf:
        problems.append(
            "the sequence length is not stated" if unit.times_sequence and not numbers["seq"]
            else f"value={text['value']!r} is no measurement: it must be above 0"
        )  # fmt: skip
        return
    values |= {"metric": unit.is_, "value": 1.0 / value if unit.inverse else value}


def _sharding(text: str, numbers: dict[str, int], problems: list[str]) -> Read:
    """Sharding of a cell such as "HSDP 2x4" or "ZeRO-1, TP=8, PP4"; its degrees go into `numbers`."""
    if OURS.fullmatch(text):
        return Read(text)
    read = read_word("zero_or_fsdp", text)
    if not read.problem or not any(c.isdigit() for c in text):
        return _hybrid(read, 8, numbers) if read.word == "hybrid" else read
    if text.isdigit():
        what = f"zero_or_fsdp={text}: a number alone may be a stage of ZeRO or a degree"
        return Read(text, (), f"{what}; write ZeRO-{text}, FSDP={text} or dp_shard={text}")
    degrees, rest = degrees_of(text)
    for name in DEGREES:
        stated = degrees.get(name)
        if stated and name != "dp" and numbers[name] not in (0, 1, stated):
            problems.append(f"{name} is {numbers[name]} in its column and {stated} in {text!r}")
        elif stated:
            numbers[name] = stated
    read = read_word("zero_or_fsdp", rest) if plain(rest) else Read("")
    if read.problem:
        return Read(text, (), read.problem)
    if "stage" in degrees:
        if not 0 <= degrees["stage"] <= 3:
            return Read(text, (), f"zero_or_fsdp={text!r}: stages of ZeRO are 0 to 3")
        return Read(("none", "zero1", "zero2", "zero3")[degrees["stage"]], read.notes)
    if "optimizer" in degrees:
        inside = 1 < degrees["optimizer"] < _data_parallel(numbers)
        note = f"optimizer states sharded in groups of {degrees['optimizer']}: priced as over all replicas"
        return Read("none" if degrees["optimizer"] == 1 else "zero1", (note,) if inside else ())
    shard = degrees.get("shard")
    if shard is None or shard < 0:
        return read if read.word or shard is None else Read("fsdp2")
    if shard == 0 or (shard == 1 and degrees.get("replicate")):
        return Read("none")
    if shard == 1:
        return Read("fsdp", ("FSDP=1 is read as: FSDP is on (Megatron Bridge's tables)",))
    two = "fsdp2" if re.search(r"dp[ _-]?shard|fsdp2|hsdp", text.lower()) else "fsdp"
    return _hybrid(Read(two, read.notes), shard, numbers, degrees.get("replicate"))


def _data_parallel(numbers: Mapping[str, int]) -> int:
    return numbers["n_gpus"] // (numbers["tp"] * numbers["pp"] * numbers["cp"])


def _hybrid(read: Read, shard: int, numbers: Mapping[str, int], replicas: int | None = None) -> Read:
    """FSDP over groups of `shard` GPUs, with replicas where the job has more."""
    kind, own = ("fsdp2" if read.word == "hybrid" else read.word), _data_parallel(numbers)
    # A degree of sharding may count the ranks of context parallelism (torchtitan's does not).
    every = own * (numbers["cp"] if shard * (replicas or 1) == own * numbers["cp"] else 1)
    times, rest = divmod(every, shard)
    if rest or not times or replicas not in (None, times):
        what = f"{shard}" if replicas is None else f"{replicas} x {shard}"
        return Read(kind, (), f"zero_or_fsdp: shards of {what} GPUs do not fill {every} data-parallel ranks")
    return Read(kind if times == 1 else f"{kind} shard={shard} x dp {times}", read.notes)


def _with_step(row: OpenRow) -> OpenRow:
    """The row with its step where FLOP/s or an MFU and their convention are stated, else as it is."""
    causal, full = CAUSAL.search(row.notes) is not None, FULL.search(row.notes) is not None
    flops = row.metric in ("tflops_per_gpu", "mfu") and HARDWARE_FLOPS not in row.notes.lower()
    if not flops or causal == full or not row.gbs_seqs * row.seq * row.n_gpus:
        return row
    try:
        shape, rate = shape_of(row), row.value * 1e12
        if row.metric == "mfu":
            if row.precision not in ("bf16", "fp16"):
                return row
            peak = machine_of(row)[0].accelerator.peak_flop_per_s("bf16")
            rate = row.value / 100.0 * peak
    except InputError:
        return row  # refused when it is scored, for that reason
    step_s = row.gbs_seqs * row.seq * flop_per_token(shape, row.seq, causal) / (row.n_gpus * rate)
    return row.model_copy(update={"metric": "step_s", "value": step_s})


# -- models -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _names() -> Mapping[str, str]:
    """Name in the rows for every key of a model that is known by its whole name."""
    names = {model_key(name): name for name in shipped_models()}
    for family in families():
        whole = [name for name in family.models if "*" not in name]
        known = {model_key(name): whole[0] if family.model else name for name in whole}
        if family.model and whole:
            known[model_key(family.model)] = whole[0]
        names |= known
    for name, others in spellings().model.same.items():
        names |= {model_key(other): names.get(model_key(name), name) for other in others}
    return names


@lru_cache(maxsize=1)
def _archs() -> Mapping[str, str]:
    archs = {name: "moe" if load_model(name).moe else "dense" for name in shipped_models()}
    return archs | {name: family.arch for family in families() for name in family.models}


@lru_cache(maxsize=512)
def model_named(text: str) -> str:
    """The name of the open rows for a model's name in any spelling; the text itself for an unknown one."""
    patterns = [name for family in families() for name in family.models]
    if any(fnmatchcase(text, name) for name in patterns) and not text.startswith("gpt-3-"):
        return text
    key = model_key(text)
    if key in _names():
        return _names()[key]
    for begins in (name.removesuffix("*") for name in patterns if name.endswith("*")):
        start = f"{model_key(begins)}-"
        if key.startswith(start):
            return begins + re.sub(r"(\d)-(b|t)(?=-|$)", r"\1\2", key[len(start) :])
    return text
