"""The `run` section of a scenario: training tokens, phases, checkpoints, failures and prices."""

from __future__ import annotations

import datetime
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.failure import (
    FailureRateRef,
    RestartRef,
    StorageRef,
    load_failure_rate,
    load_restart,
    load_storage,
)
from moesim.hwmodels.files import is_there
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.price import Offer, PurchaseRef, RentChoice
from moesim.hwmodels.provenance import (
    SourcedBytes,
    SourcedBytesPerSecond,
    SourcedFraction,
    SourcedGpuHours,
    SourcedPerNodeDay,
    SourcedSeconds,
)
from moesim.hwmodels.ranges import within
from moesim.hwmodels.units import parse_quantity
from moesim.hwmodels.validation import nearest, validate_model
from moesim.hwmodels.yaml_io import EXTENSIONS, by_name, load_mapping, parse_mapping
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.scenario.defaults import Chosen, Default, tokens_of

FOLDER = "data/runs"
OPTIMAL = "optimal"

Tokens = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]


class Ramp(Section):
    """Batch ramp: from `sequences` to the full batch in equal increments, each for the same tokens."""

    sequences: PositiveInt
    """Batch of the first step."""
    tokens: Tokens
    """Tokens after which the full batch is reached."""
    increment: PositiveInt | None = None
    """Sequences that the batch grows by; absent = one micro-batch more for every pipeline."""


class RunPhase(Section):
    """A phase after the main one: its length as tokens, steps or GPU-hours, and what differs in it."""

    name: str = Field(min_length=1, pattern=r"^[^.]*$")
    """Shown in the report; no dot."""
    tokens: Tokens | None = None
    """Its length in tokens."""
    steps: PositiveInt | None = None
    """Its length in steps."""
    gpu_hours: SourcedGpuHours | None = None
    """Stated, not predicted: nothing is simulated for it, and it is taken to include its own stops."""
    sequences: PositiveInt | None = None
    """Its batch; absent: the scenario's."""
    sequence_length: PositiveInt | None = None
    """Its sequence length; absent: the scenario's."""
    ramp: Ramp | None = None
    """Batch ramp at its beginning."""
    override: tuple[str, ...] = ()
    """Scenario keys that differ, such as "parallel.cp=8"; sequences and sequence_length have their own."""
    assumption: str = ""
    """Why these overrides, where nobody published them; shown in the report."""

    @model_validator(mode="after")
    def _one_length(self) -> RunPhase:
        given = [k for k in ("tokens", "steps", "gpu_hours") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"phase {self.name!r} needs exactly one of tokens, steps, gpu_hours; has {given}"
            )
        if self.gpu_hours is not None and (self.override or self.ramp or self.sequences):
            raise ValueError(f"phase {self.name!r} states gpu_hours: nothing else can be set for it")
        if self.ramp is not None and self.steps is not None:
            raise ValueError(f"phase {self.name!r}: a ramp goes by tokens; give tokens instead of steps")
        if self.ramp is not None and self.tokens is not None and self.ramp.tokens > self.tokens:
            raise ValueError(
                f"phase {self.name!r}: ramp.tokens={self.ramp.tokens:g} exceeds its tokens={self.tokens:g}"
            )
        for text in self.override:
            if overridden_key(text).split(".")[0] in ("run", "batch", "cluster", "name", "seed"):
                raise ValueError(
                    f"phase {self.name!r}: override {text!r}: run, batch, cluster, name and seed are those "
                    "of the whole run (sequences and sequence_length are keys of the phase)"
                )
        return self


def _interval(text: str, place: str) -> str:
    """A checkpoint interval: a time above 0, or "optimal"."""
    if text == OPTIMAL:
        return text
    try:
        seconds = parse_quantity(text, "s")
    except InputError as error:
        raise ValueError(f"{error}; or write {OPTIMAL!r}") from None
    if not seconds > 0.0:
        raise ValueError(f"{place}.interval={text!r} must be longer than 0")
    return text


TierName = Literal["peer", "host", "disk"]
SURVIVES: dict[TierName, int] = {"host": 0, "disk": 0, "peer": 1}
"""What a checkpoint outlives: 0 a crash of processes, 1 also the loss of its node, 2 also that of a rack."""


class CheckpointTier(Section):
    """A faster place for checkpoints than the storage."""

    where: TierName
    """`peer`: memory of a GPU or host on another node; `host`: memory of the own host; `disk`: its disk."""
    interval: str
    """Training time between two of them ("5 min"), or "optimal"."""
    bandwidth: SourcedBytesPerSecond | None = None
    """Rate at which one GPU's share is copied there."""
    asynchronous: bool = False
    """True: training waits for the copy over the host link only."""
    other_rack: bool = False
    """A `peer` in another rack, so that the copy outlives the loss of a whole rack."""

    @model_validator(mode="after")
    def _complete(self) -> CheckpointTier:
        _interval(self.interval, "checkpoint.tiers")
        if self.bandwidth is None:
            raise ValueError(
                f"checkpoint.tiers: tier {self.where!r} has no bandwidth, so nobody knows how long training "
                "waits for it; state the rate of one GPU, for example bandwidth: 25 GB/s"
            )
        if self.other_rack and self.where != "peer":
            raise ValueError(f"checkpoint.tiers: other_rack is for a peer, not for {self.where!r}")
        return self

    @property
    def outlives(self) -> int:
        """What it outlives (see `SURVIVES`)."""
        return 2 if self.other_rack else SURVIVES[self.where]


class Checkpoint(Section):
    """How the state is saved: how often, where to, and whether training waits for it."""

    interval: str
    """Training time between two checkpoints ("30 min"), or "optimal"."""
    storage: StorageRef
    """A shipped storage, a file, or `{write: "2 TB/s", write_per_node: ...}`."""
    asynchronous: bool = False
    """True: training waits for the copy to host memory only; the write goes on behind it."""
    size: SourcedBytes | None = None
    """Bytes of one checkpoint; absent = master weights and both moments of every parameter (eq. J2)."""
    stall: SourcedSeconds | None = None
    """Time that training waits for one checkpoint; absent = from bytes and bandwidths (eq. J3)."""

    interference: SourcedFraction | None = None
    """Share by which training is slower while an asynchronous write goes on; absent: not at all."""
    tiers: tuple[CheckpointTier, ...] = ()
    """Faster places beside the storage, the fastest first; a fault loads from the first that outlives it."""

    @model_validator(mode="after")
    def _interval_is_a_time(self) -> Checkpoint:
        _interval(self.interval, "checkpoint")
        if self.interference is not None and not self.asynchronous:
            raise ValueError("checkpoint.interference is of an asynchronous write; set asynchronous: true")
        if len({tier.where for tier in self.tiers}) < len(self.tiers):
            raise ValueError("checkpoint.tiers: each place once")
        outlives = [tier.outlives for tier in self.tiers]
        if outlives != sorted(outlives):
            raise ValueError("checkpoint.tiers: list those first that outlive least: host or disk, then peer")
        return self

    @property
    def interval_s(self) -> float | None:
        """The interval in seconds; None for the optimal one."""
        return None if self.interval == OPTIMAL else parse_quantity(self.interval, "s")


class StartUp(Section):
    """What a job does before its first step; a restart's recovery contains it already."""

    communicators: SourcedSeconds = SourcedSeconds(
        value=0.0027,
        kind="published",
        source="NCCL's 265 s at 96k GPUs (arXiv 2510.20171, read in a public summary), and MegaScale's upper "
        "limits of 5 s at 2,048 and 30 s above 10,000 GPUs (arXiv 2402.15627): 2.4 to 2.9 ms a GPU",
        date="2025-10",
        note="0.25 ms with NCCLX; 510 ms with the first store of the same MegaScale job",
    )
    """Set-up of all groups of communicators, for each GPU of the job (eq. J10)."""
    build: SourcedSeconds = SourcedSeconds(
        value=0.0,
        kind="assumed",
        source="nobody published it apart from the rest of a restart",
        date="2026-11-22",
    )
    """Model build, loading and the first step's compilation or graph capture."""

    def seconds(self, gpus: int) -> float:
        """Time of one start on a number of GPUs (eq. J10)."""
        return gpus * self.communicators.value + self.build.value


class Spares(Section):
    """Nodes that stand by, paid like the others, and how long a broken node is away."""

    count: Annotated[int, Field(ge=0, le=100_000, strict=True)]
    """Nodes that stand by, paid like the others."""
    repair: SourcedSeconds
    """How long a broken node is away."""
    kind: Literal["cold", "warm", "hot"] = "cold"
    """`warm`: with image and environment; `hot`: with the processes too (both by `restart.parts`)."""
    crews: Annotated[int, Field(ge=1, le=100_000, strict=True)] | None = None
    """Nodes that can be repaired at a time; absent: all."""
    trays: Annotated[int, Field(ge=0, le=17, strict=True)] = 0
    """Spare compute trays in every NVL72 rack, which replace a tray of the same rack."""


class Slow(Section):
    """GPUs and links that make the whole job slower, without stopping it."""

    rate: SourcedPerNodeDay
    """Nodes that become slow."""
    factor: Annotated[SourcedFraction, within(1.0, 100.0)]
    """Step time with a slow node over that without."""
    detection: SourcedSeconds
    """Time until one is noticed; then its node is replaced in a planned stop."""
    undetected: Annotated[SourcedFraction, within(0.0, 1.0)] = SourcedFraction(
        value=0.0, kind="assumed", source="all are noticed unless stated", date="2026-11-26"
    )
    """Share that nobody notices."""
    lasts: SourcedSeconds | None = None
    """How long an unnoticed one lasts."""

    @model_validator(mode="after")
    def _ends(self) -> Slow:
        if self.undetected.value > 0.0 and self.lasts is None:
            raise ValueError("slow.undetected needs slow.lasts: how long an unnoticed slow node lasts")
        return self


class Preemption(Section):
    """Nodes that the provider takes back (spot)."""

    rate: SourcedPerNodeDay
    """Nodes taken back."""
    notice: SourcedSeconds
    """Warning; if it is long enough for a checkpoint, nothing is lost."""
    away: SourcedSeconds
    """Time until another node comes, where `run.spares` are used up."""


class Maintenance(Section):
    """Planned stops of the whole job."""

    every: SourcedSeconds
    """Time between the end of one and the begin of the next, about."""
    lasts: SourcedSeconds
    """How long each lasts, without the checkpoint before and the restart after it."""

    @model_validator(mode="after")
    def _rare(self) -> Maintenance:
        if not self.every.value > 0.0:
            raise ValueError("maintenance.every=0 s must be longer than 0; nearest: 1 day")
        return self


class FaultTolerance(Section):
    """Replica groups that can be away while the others train on (torchft, FT-HSDP), or an elastic batch."""

    groups: Annotated[int, Field(ge=2, le=100_000, strict=True)]
    """Replica groups of equal size."""
    mode: Literal["continue", "elastic"] = "continue"
    """`continue`: the others go on when one is lost. `elastic`: the job restarts, smaller without a spare."""
    minimum: PositiveInt = 1
    """Fewest groups that train."""
    stall: SourcedSeconds | None = None
    """Stop of all groups when one is lost, detection included; needed by `continue`."""
    rejoin: SourcedSeconds | None = None
    """Stop of all groups when one comes back; absent: that of `stall`."""
    step_cost: Annotated[SourcedFraction, within(0.0, 10.0)] = SourcedFraction(
        value=0.0,
        kind="assumed",
        source="no cost of fault tolerance in a step unless stated",
        date="2026-11-26",
    )
    """Share by which it makes every step longer."""
    batch: Literal["shrink", "keep"] = "shrink"
    """What a lost group does to the batch: smaller, or its micro-batches go to the others."""

    @model_validator(mode="after")
    def _belongs(self) -> FaultTolerance:
        if self.minimum > self.groups:
            raise ValueError(f"minimum={self.minimum} exceeds groups={self.groups}; nearest: {self.groups}")
        if self.mode == "continue" and self.stall is None:
            raise ValueError("fault_tolerance.stall is missing: how long all groups stop when one is lost")
        return self


class Price(Section):
    """What the run is paid with; exactly one of the three. Absent = the cluster's price per GPU-hour."""

    offer: Offer | None = None
    """A price of your own, with its date."""
    rent: RentChoice | None = None
    """A shipped offer for the cluster's accelerator."""
    buy: PurchaseRef | None = None
    """A shipped purchase, a file, or its figures."""

    @model_validator(mode="after")
    def _one_way(self) -> Price:
        given = [k for k in ("offer", "rent", "buy") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"price needs exactly one of offer, rent, buy; has {', '.join(given) or 'none'}")
        return self


class RunPlan(Section):
    """The whole run: tokens of the main phase at the scenario's batch, and optionally all the rest."""

    tokens: Tokens = Field(
        default_factory=lambda: tokens_of("")[0],
        description="Tokens of the main phase. Absent: what the model was trained on where that is known, "
        "else 1 T.",
    )
    ramp: Ramp | None = None
    """Batch ramp of the main phase."""
    phases: tuple[RunPhase, ...] = ()
    """What follows the main phase."""
    checkpoint: Checkpoint | None = None
    """How the state is saved."""
    failures: FailureRateRef | None = None
    """A shipped rate, a file, or `{interruptions: "4 /1000 node-days"}`; needs checkpoint and restart.
    Absent: none for one step, and a rate chosen by rule for the whole run; `none`: no failures at all."""
    restart: RestartRef | None = None
    """A shipped restart, a file, or `{detection: "5 min", recovery: "10 min"}`."""
    startup: StartUp | None = None
    """`{communicators: "2.7 ms", build: "5 min"}`, at the start of the run and of every later phase with
    overrides; absent: the published set-up of communicators where `restart` is given, else nothing."""
    spares: Spares | None = None
    """Nodes that stand by; absent: always at hand and unpaid."""
    slow: Slow | None = None
    """Slow GPUs and links: `{rate: "0.1 /1000 node-days", factor: 1.2, detection: 1 h}`; absent: none."""
    preemption: Preemption | None = None
    """Nodes taken back: `{rate: "6 /1000 node-days", notice: 2 min, away: 1 h}`; absent: none, but a rate
    chosen by rule for a whole run on spot offers."""
    maintenance: Maintenance | None = None
    """Planned stops: `{every: 7 days, lasts: 2 h}`; absent: none."""
    fault_tolerance: FaultTolerance | None = None
    """`{groups: 16, stall: 30 s}`; absent: any fault restarts the whole job."""
    start: datetime.date | None = None
    """Date of the start; gives dates of the finish."""
    price: Price | None = None
    """What the run is paid with; absent: the cluster's price per GPU-hour."""
    replicas: int = Field(100, ge=1, le=100_000)
    """Seeded repetitions of the run that the distribution of the finish date comes from."""

    @model_validator(mode="after")
    def _belongs_together(self) -> RunPlan:
        if self.interrupted:
            missing = [k for k in ("checkpoint", "restart") if getattr(self, k) is None]
            if missing:
                raise ValueError(
                    f"run.failures needs run.{' and run.'.join(missing)}: without them nobody knows what an "
                    "interruption costs (for example restart: megascale, checkpoint: {interval: 30 min, "
                    "storage: llama3-tectonic})"
                )
        if self.ramp is not None and self.ramp.tokens > self.tokens:
            raise ValueError(f"run.ramp.tokens={self.ramp.tokens:g} exceeds run.tokens={self.tokens:g}")
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names) or "main" in names:
            raise ValueError(
                f"run.phases: names must differ, and 'main' is the first one's; they are {names}"
            )
        if self.checkpoint is not None and self.checkpoint.interval == OPTIMAL and not self.interrupted:
            raise ValueError("run.checkpoint.interval: optimal needs run.failures; or state a time")
        stated = [k for k in ("slow", "preemption", "maintenance") if getattr(self, k) is not None]
        if stated and self.restart is None and self.failures is not None:
            raise ValueError(f"run.{stated[0]} needs run.restart: every planned stop ends with a restart")
        return self

    @property
    def interrupted(self) -> bool:
        """Whether the plan states failures, at a rate above zero."""
        return self.failures is not None and self.failures.interruptions.value > 0.0

    def start_s(self, gpus: int) -> float:
        """Seconds of one start of the job on a number of GPUs."""
        startup = self.startup or (StartUp() if self.restart is not None else None)
        return 0.0 if startup is None else startup.seconds(gpus)

    @property
    def asks_for_more(self) -> bool:
        """Whether keys other than tokens and replicas are set, so that a report is worth its simulations."""
        plain = RunPlan(tokens=self.tokens, replicas=self.replicas)
        return self != plain


# -- what a run assumes that does not mention failures -------------------------------------------------

GPUS_OF_A_NODE = 8
"""GPUs of the nodes that all shipped failure rates count."""
RATES = {"Ampere": "meta-rsc1", "Hopper": "llama3-16k-h100"}
"""Shipped failure rate that was taken on an architecture, on its largest cluster."""
CARRIED_OVER = "llama3-16k-h100"
"""Rate for every other architecture, on which nobody published one."""
RESTART = "by-parts"
"""Shipped restart that grows with the job, as restarts do."""
SPOT = Preemption(
    rate=SourcedPerNodeDay(
        value=0.2 / 30.4, kind="assumed", date="2026-11-26", between=(0.05 / 30.4, 0.5 / 30.4),
        source="AWS Spot Instance Advisor: classes of interruption, from below 5 % to above 20 % a month",
    ),
    notice=SourcedSeconds(
        value=120.0, kind="published", date="2026-11-26",
        source="AWS EC2 user guide: spot instances get a notice of two minutes",
    ),
    away=SourcedSeconds(
        value=3600.0, kind="assumed", date="2026-11-26", between=(300.0, 86400.0),
        source="nobody published how long a node of eight GPUs is away",
    ),
)  # fmt: skip
"""Preemption of a run that is rented on spot and states none."""
STORAGE = "deepseek-3fs"
"""Shipped storage whose rate for each node is published, so that a small cluster writes more slowly."""


def default_stops(run: RunPlan, cluster: Cluster) -> dict[str, Chosen]:
    """Failures, and restart and checkpoint where the plan states none, by key below `run`."""
    chosen = {"failures": _failures(cluster)}
    if run.restart is None:
        restart = load_restart(RESTART)
        why = f"assumed: {restart.title}; {restart.source}"
        chosen["restart"] = _chosen("restart", RESTART, RESTART, why, restart.source)
    if run.checkpoint is None:
        storage = load_storage(STORAGE)
        text = f"{OPTIMAL} interval to {STORAGE}"
        why = f"assumed, as {storage.title}; the interval costs least (eq. J6), and training waits for writes"
        value: object = {"interval": OPTIMAL, "storage": STORAGE}
        chosen["checkpoint"] = _chosen("checkpoint", value, text, why, storage.title)
    rent = run.price.rent if run.price is not None else None
    if rent is not None and rent.term == "spot" and run.preemption is None:
        value = SPOT.model_dump(mode="json", exclude_none=True)
        text = f"{SPOT.rate.text}, {SPOT.notice.text} notice, {SPOT.away.text} away"
        chosen["preemption"] = _chosen("preemption", value, text, "assumed for spot", SPOT.rate.source)
    return chosen


def _failures(cluster: Cluster) -> Chosen:
    """The published rate of the accelerator's architecture; per GPU where a node has not eight of them."""
    chip, gpus = cluster.accelerator, cluster.node.n_gpus
    name = RATES.get(chip.architecture or "", CARRIED_OVER)
    rate = load_failure_rate(name)
    taken = f"{rate.interruptions.source} ({1000 * rate.interruptions.value:.3g} in 1,000 node-days)"
    if chip.architecture in RATES:
        why = f"assumed from the same architecture, {taken}"
    else:
        why = f"assumed, since nobody published one on {chip.name}; carried over from {taken}"
    if gpus == GPUS_OF_A_NODE:
        return _chosen("failures", name, name, f"{why}; none turns them off", rate.interruptions.source)
    why += f", times {gpus}/{GPUS_OF_A_NODE} for the GPUs of a node; none turns them off"
    number = rate.interruptions.value * gpus / GPUS_OF_A_NODE
    value = rate.model_dump(mode="json", exclude_none=True) | {
        "name": f"{name}-per-gpu",
        "interruptions": {
            "value": f"{number:.12g} /node-day",
            "kind": "derived",
            "source": f"{rate.interruptions.source}; times {gpus}/{GPUS_OF_A_NODE} for the GPUs of a node",
            "date": rate.interruptions.date,
        },
    }
    return _chosen("failures", value, f"{number:.3g} /node-day", why, rate.interruptions.source)


def _chosen(key: str, value: object, text: str, why: str, source: str) -> Chosen:
    """A default of the run; each is assumed, since it was observed in somebody else's cluster."""
    return Chosen(value, Default(key=f"run.{key}", value=text, why=why, kind="assumed", source=source))


def run_plan_names() -> list[str]:
    """Names of the run plans that ship with the package."""
    folder = resources.files("moesim.simulator").joinpath(FOLDER)
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_run_plan(name: str, base: Path | None = None) -> RunPlan:
    """The run plan of a shipped name or a file (relative to the file `base`); InputError if unknown."""
    if name in run_plan_names():
        text = resources.files("moesim.simulator").joinpath(FOLDER, f"{name}.yaml").read_text("utf-8")
        return validate_model(RunPlan, parse_mapping(text, f"run plan {name}"), f"run plan {name}")
    if name.lower().endswith(EXTENSIONS):
        path = Path(name)
        if base is not None and not path.is_absolute() and is_there(base.parent / path):
            path = base.parent / path
        return validate_model(RunPlan, load_mapping(path), str(path))
    raise InputError(
        f"unknown run plan {name!r}{nearest(name, run_plan_names())}; the known ones are "
        f"{', '.join(run_plan_names())}, or give the keys of a plan or a file that ends in "
        f"{', '.join(EXTENSIONS)}"
    )


RunPlanRef = Annotated[RunPlan, by_name(RunPlan, load_run_plan)]
"""A field that takes a run plan's name, path or keys."""
