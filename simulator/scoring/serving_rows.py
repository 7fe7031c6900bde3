"""Measured serving runs: rows of TTFT and TPOT, and the deployment and load that each of them ran.

A row says model, machine, plan, lengths and concurrency. The flags of its engine stand in the scripts that
measured it, which `data/published/serving-recipes.yaml` repeats rule by rule.
"""

from __future__ import annotations

import csv
import io
import lzma
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest
from moesim.simulator.scoring import file_records, published_data

FILE, RECIPES = "serving-rows.csv.xz", "serving-recipes.yaml"
COLUMNS = frozenset(
    ["source", "system", "model", "hardware", "conditions", "metric", "unit", "value", "where"]
)
"""Columns of a table of serving runs."""
MODELS = {
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
"""Shipped models by the names in the rows; DeepSeek-R1 has the shape of V3."""
CLUSTERS = {"H100-SXM": "h100-1024", "H200-SXM": "h200-1024", "B200-SXM": "b200-1024"}
UNITS = {"ms": 1e-3, "s": 1.0, "us": 1e-6}
OF_THE_LOAD = "concurrency"
"""What a rule says of `max_num_seqs` where the server has as many places as the load has requests."""
UNKNOWN = "unknown"
"""What a rule says of drafts where the runs of a day had them or not."""


class ServedPlan(NamedTuple):
    """GPUs of a pool: equal replicas of `tp` x `dp` GPUs with experts over `ep`."""

    replicas: int
    tp: int
    dp: int
    ep: int

    def __str__(self) -> str:
        """Such as 9x TP8 EP8."""
        degrees = [f"{name}{n}" for name, n in zip(("TP", "DP", "EP"), self[1:], strict=True) if n > 1]
        return f"{f'{self.replicas}x ' if self.replicas > 1 else ''}{' '.join(degrees) or 'one GPU'}"


class ServingRow(Frozen):
    """One run: what its source says, and its measured seconds (None where they were not given).

    `group`: its configuration's number in the source, such as cfg87. `prefill` is the pool of prompts of a
    disaggregated run. `unread`: why it cannot be read.
    """

    id: str
    where: str
    source: str
    engine: str
    release: str
    model: str
    hardware: str
    precision: str
    day: str
    group: str
    isl: int = 0
    osl: int = 0
    concurrency: int = 0
    plan: ServedPlan = ServedPlan(1, 1, 1, 1)
    prefill: ServedPlan | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    complete: bool = True
    unread: str = ""

    @property
    def title(self) -> str:
        """Model, machine, engine, plan and lengths in words."""
        plan = f"{self.prefill} + {self.plan}" if self.prefill else f"{self.plan}"
        load = f"{self.isl}/{self.osl} x {self.concurrency}"
        return f"{self.model} on {self.hardware}, {self.engine} {self.release}, {plan}, {load}"


class ServedRun(NamedTuple):
    """A row as a deployment and its load; `setup` is the scenario's `serving` without its load.

    `known` tells whether it is known that drafts were used or not, `warmed` whether requests warmed the
    server up; `notes` say what was read how.
    """

    model: str
    cluster: str
    setup: Mapping[str, Any]
    lengths: tuple[int, int]
    concurrency: int
    known: bool
    warmed: bool = True
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Equal for runs of one deployment."""
        return repr((self.model, self.cluster, sorted(self.setup.items(), key=lambda item: item[0])))


# -- rows ---------------------------------------------------------------------------------------------


def serving_rows(file: Path | None = None) -> tuple[ServingRow, ...]:
    """The runs of a table (the shipped one by default), its metrics joined by `where`.

    Raises InputError for a table with other columns; a line that cannot be read says so in `unread`.
    """
    records = _shipped() if file is None else file_records(file)
    if missing := COLUMNS - set(records[0]):
        raise InputError(
            f"{'the table' if file is None else file.name} has no column {', '.join(sorted(missing))}; a "
            f"table of serving runs has {', '.join(sorted(COLUMNS))}"
        )
    joined: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:
        key = tuple(record[name] for name in ("where", "conditions", "hardware", "model", "system"))
        run = joined.setdefault(key, {"record": record, "unread": ""})
        seconds, problem = _seconds(record)
        run[record["metric"]] = seconds
        run["unread"] = run["unread"] or problem
    return tuple(_row(run["record"], run) for run in joined.values())


@lru_cache(maxsize=1)
def _shipped() -> list[dict[str, str]]:
    path = resources.files("moesim.simulator").joinpath("data", "published", FILE)
    return list(csv.DictReader(io.StringIO(lzma.decompress(path.read_bytes()).decode())))


def _seconds(record: Mapping[str, str]) -> tuple[float | None, str]:
    if record["metric"] not in ("ttft", "tpot"):
        return (
            None,
            f"metric={record['metric']!r} is not scored{nearest(record['metric'], ['ttft', 'tpot'])}",
        )
    if record["unit"] not in UNITS:
        return None, f"unit={record['unit']!r} is none of {', '.join(UNITS)}"
    try:
        value = float(record["value"]) * UNITS[record["unit"]]
    except ValueError:
        return None, f"value={record['value']!r} is no number"
    return (value, "") if 0 < value < 1e5 else (None, f"value={record['value']!r} is no time above 0")


def _row(record: Mapping[str, str], run: Mapping[str, Any]) -> ServingRow:
    engine, _, release = record["system"].partition(" ")
    said = dict(_pairs(record["conditions"]))
    id_ = record["where"].partition("id=")[2].strip() or record["where"]
    group = re.search(r"cfg\d+$", id_)
    fields: dict[str, Any] = {
        "id": id_, "where": record["where"], "source": record["source"], "engine": engine,
        "release": release.strip(), "model": record["model"], "hardware": record["hardware"],
        "precision": said.get("precision", ""), "day": said.get("measured", ""),
        "group": group[0] if group else "", "ttft_s": run.get("ttft"), "tpot_s": run.get("tpot"),
        "complete": said.get("plan_complete", "yes") == "yes",
    }  # fmt: skip
    try:
        for name in ("isl", "osl", "concurrency"):
            fields[name] = int(said[name])
        if "disagg" in said:
            fields["prefill"], fields["plan"] = (
                _pool(said[f"{role}: workers"]) for role in ("prefill", "decode")
            )
        else:
            degrees = {name: int(said[name]) for name in ("tp", "attn_dp", "moe_tp", "moe_ep")}
            fields["plan"] = _plan(degrees, id_)
        if said.get("pp", "1") != "1":
            raise ValueError(f"pp={said['pp']}: pipelines of an engine are not read from rows")
    except KeyError as missing:
        fields["unread"] = f"the conditions do not state {missing.args[0]}"
    except ValueError as problem:
        fields["unread"] = str(problem)
    fields["unread"] = run["unread"] or fields.get("unread", "")
    return ServingRow(**fields)


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    """Conditions such as `isl=1024; disagg; prefill: workers=1 tp=8`."""
    for part in text.split(";"):
        name, _, value = part.strip().partition("=")
        yield name, value


def _plan(degrees: Mapping[str, int], id_: str) -> ServedPlan:
    """The plan of one engine. `moe_tp` x `moe_ep` GPUs share the experts.

    Lists of InferenceX runs multiply TP by EP where both are above 1; their ids say tp8_ep8, and the scripts
    of these runs have one node, so that the number of GPUs is the product over EP.
    """
    tp, dp, moe_tp, moe_ep = (degrees[name] for name in ("tp", "attn_dp", "moe_tp", "moe_ep"))
    gpus = tp * dp
    if moe_tp * moe_ep != gpus:
        raise ValueError(
            f"moe_tp={moe_tp} x moe_ep={moe_ep} are not tp={tp} x attn_dp={dp}: experts on other GPUs than "
            "attention are not served by one engine"
        )
    if moe_tp > 1 and moe_ep > 1 and not id_.partition("_ep")[2].startswith("none"):
        gpus //= moe_ep
    return ServedPlan(1, 1 if dp > 1 else gpus, gpus if dp > 1 else 1, moe_ep)


def _pool(text: str) -> ServedPlan:
    """A pool such as `2 tp=1 attn_dp=8 moe_tp=1 moe_ep=8 batch=16`."""
    workers, *rest = text.split()
    said = {name: int(value) for name, _, value in (word.partition("=") for word in rest)}
    tp, dp = said["tp"], said["attn_dp"]
    return ServedPlan(int(workers), tp, dp, said["moe_ep"])


# -- recipes --------------------------------------------------------------------------------------------


class Load(Frozen):
    """The closed loop of the rows' benchmark: `requests_per_slot` requests for each of `concurrency`.

    Lengths are uniform from `shortest` x the stated one to the stated one. Before the day `warmed_since` the
    first wave may have waited `cold_s` for kernels of new shapes.
    """

    requests_per_slot: int
    shortest: float
    statistic: str
    prefix_caching: bool
    tokeniser_s_per_token: float
    warmed_since: str
    cold_s: float


class Recipes(Frozen):
    """How the runs were started, and by which load."""

    source: str
    load: Load
    rules: tuple[dict[str, Any], ...]


@lru_cache(maxsize=1)
def recipes() -> Recipes:
    """The shipped recipes; raises InputError for a malformed file."""
    return published_data(Recipes, RECIPES)


def _holds(wanted: object, value: object) -> bool:
    if isinstance(wanted, (list, tuple)):
        if len(wanted) == 2 and not str(wanted[0]).startswith("cfg"):
            return bool(wanted[0] <= value <= wanted[1])
        return value in wanted
    return value == wanted


def run_of(row: ServingRow, rows: Sequence[ServingRow] = ()) -> ServedRun:
    """The deployment and load of a row; `rows` may have its twin, with or without drafts.

    Raises InputError for a row that cannot be read, or whose model, machine or engine is not known here.
    """
    if row.unread:
        raise InputError(row.unread)
    for name, known in (("model", MODELS), ("hardware", CLUSTERS)):
        if getattr(row, name) not in known:
            raise InputError(f"{name}={getattr(row, name)!r} is not read here; known: {', '.join(known)}")
    plan = row.plan
    facts: dict[str, Any] = {
        "model": MODELS[row.model], "hardware": row.hardware, "engine": row.engine, "release": row.release,
        "precision": row.precision, "day": row.day, "group": row.group, "isl": row.isl, "osl": row.osl,
        "concurrency": row.concurrency, "tp": plan.tp, "row_ep": plan.ep, "dp": plan.dp > 1, "drafts": 0,
        "mode": "disagg" if row.prefill else "agg",
    }  # fmt: skip
    setup: dict[str, Any] = {}
    for rule in recipes().rules:
        if all(_holds(wanted, facts.get(name)) for name, wanted in rule["when"].items()):
            given = dict(rule["set"])
            setup |= {name: value for name, value in given.items() if name not in ("drafts", "dp", "ep")}
            if given.get("ep") == "tp":
                plan = plan._replace(ep=plan.tp * plan.dp)
            if given.get("dp"):
                plan = plan._replace(tp=1, dp=plan.tp * plan.dp)
            facts |= {name: given[name] for name in ("drafts", "dp") if name in given}
    if "refused" in setup:
        raise InputError(setup["refused"])
    if "engine" not in setup:
        raise InputError(
            f"engine={row.engine!r} is not read here{nearest(row.engine, ['vllm', 'sglang', 'trtllm'])}"
        )
    drafts, notes = facts["drafts"], []
    if drafts == UNKNOWN:
        drafts = _drafts_by_twin(row, rows)
    is_known = drafts is not None
    if not is_known:
        notes.append("drafts (MTP) are not stated, and both kinds ran: predicted without")
    if plan != row.plan:
        notes.append(f"read as {plan}: the row leaves out what the script chose")
    drafts = drafts or 0
    if (floor := setup.pop("tokens_floor", None)) is not None:
        slots = (1 + drafts) * -(-row.concurrency // plan.dp) if drafts else row.concurrency
        most = (slots + row.isl + 127) // 64 * 64
        setup["max_num_batched_tokens"] = most if drafts else max(most, floor)
    if setup["max_num_seqs"] == OF_THE_LOAD:
        setup["max_num_seqs"] = max(row.concurrency // plan.dp, 1)
    setup |= {"replicas": plan.replicas, "tp": plan.tp, "dp": plan.dp, "ep": plan.ep, "draft_tokens": drafts}
    setup["prefix_caching"] = recipes().load.prefix_caching
    if row.prefill is not None:
        same = {key: setup[key] for key in ("max_num_batched_tokens", "max_num_seqs", "memory_fraction")}
        setup["prefill"] = {**same, **dict(zip(ServedPlan._fields, row.prefill, strict=True))}
    return ServedRun(
        MODELS[row.model], CLUSTERS[row.hardware], setup, (row.isl, row.osl), row.concurrency, is_known,
        row.day >= recipes().load.warmed_since, tuple(notes),
    )  # fmt: skip


def same_conditions(row: ServingRow) -> tuple[Any, ...]:
    """Equal for rows of one configuration, day and load."""
    return (
        row.model, row.hardware, row.engine, row.release, row.day, row.precision, row.plan, row.prefill,
        row.isl, row.osl, row.concurrency,
    )  # fmt: skip


def _drafts_by_twin(row: ServingRow, rows: Sequence[ServingRow]) -> int | None:
    """Drafts of a row by its twin: of two different runs of the same conditions the quicker one had drafts.

    None without a twin. 0 where a run that is known to be without drafts (cfg87) has the row's own figure.
    """
    twins = {one.tpot_s for one in rows if same_conditions(one) == same_conditions(row) and one.tpot_s}
    if len(twins) != 2 or row.tpot_s is None or row.prefill is not None:
        return None
    return 0 if row.tpot_s == max(twins) else {"sglang": 2}.get(row.engine, 3)
