"""The decode step that a served load runs on average, its parts, and the evidence behind each (pure)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Section
from moesim.hwmodels.summary_text import count, percent
from moesim.simulator.serving.deployment import Deployment, Spreads
from moesim.simulator.serving.exchange import LINKS_PROFILE
from moesim.simulator.serving.linear import ELEMENT_BYTES
from moesim.simulator.serving.prices import SHIPPED, laws, measured_on
from moesim.simulator.serving.replicas import PaceModel, Served, StepPace
from moesim.simulator.serving.requests import NS_PER_S
from moesim.simulator.serving.scheduler import StepBatch
from moesim.simulator.serving.step import StepCost, StepModel, StepPart

Basis = Literal["measured", "scaled", "roofline", "assumed"]
"""What prices a part, the best first: a law or curve of measured kernels or transfers; one of another card
or of wider weights, scaled; nominal links times a generic curve; or no measurement."""


class TypicalStep(Struct, frozen=True):
    """The decode step that a served load runs on average: the batch of each rank, and its cost."""

    batch: StepBatch
    ranks: int
    cost: StepCost

    @property
    def words(self) -> str:
        """The batch in words."""
        each = "" if self.ranks == 1 else f" on each of {self.ranks} ranks"
        keys = self.batch.context // max(self.batch.decodes, 1)
        return f"{count(self.batch.decodes, 'sequence')} of {keys:,} tokens{each}"


def typical_step(model: StepModel, served: Served) -> TypicalStep:
    """The decode step with the mean number of sequences (Little's law) at the mean context of a token.

    `model`: of the pool that decodes. Raises InputError where no request has a second token.
    """
    one, requests = model.deployment, served.requests
    later = requests.output_tokens > 1
    if not later.any():
        raise InputError("no request has a second token, so there is no decode step to show")
    time = (served.last_token_ns - served.first_token_ns - served.transfer_ns.clip(0)) * later
    ranks = one.pool.dp * one.pool.replicas
    mean = float(time.sum()) / max(int(served.last_token_ns.max()), 1) / ranks
    sequences = min(max(round(mean), 1), one.pool.max_num_seqs)
    lengths = requests.input_tokens + requests.output_tokens / 2
    context = round(float((lengths * time).sum()) / max(float(time.sum()), 1.0))
    batch = StepBatch(sequences, sequences * context, 0, 0, 0)
    return TypicalStep(batch, one.pool.dp, model.cost([batch] * one.pool.dp))


# -- ends of the interval -------------------------------------------------------------------------------


class Stretched:
    """Step times at an end of the step model's 80 % interval, all steps of a run alike.

    `ratios`: of a step to that of `model`, by whether it has prompts and the bits of its most sequences.
    """

    def __init__(self, deployment: Deployment, high: bool) -> None:
        """`high`: the slow end."""
        self.model, self._high = StepModel(deployment), high
        self.ratios: dict[tuple[bool, int], float] = {}

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        """The model's pace, times the ratio of a batch of about that size."""
        pace, most = self.model.pace(now_ns, ranks), max(rank.decodes for rank in ranks)
        key = any(rank.prefill_tokens for rank in ranks), most.bit_length()
        if (ratio := self.ratios.get(key)) is None:
            cost = self.model.cost(ranks)
            ratio = self.ratios[key] = (cost.high if self._high else cost.low) / cost.seconds
        return StepPace(pace.first_ns * ratio, pace.growth_ns * ratio, pace.steps)


class Drifting:
    """Step times of a pool whose experts' load drifts: each period has a model of its own."""

    def __init__(self, deployment: Deployment, times: Callable[[Deployment], PaceModel]) -> None:
        """`times`: makes the model of a period from the deployment with its load."""
        periods = deployment.serving.expert_drift
        spreads = deployment.spreads or Spreads.usual(deployment.cluster.accelerator.architecture)
        kinds = {
            cv: times(replace(deployment, spreads=spreads._replace(expert_load=cv)))
            for cv in dict.fromkeys(period.expert_load_cv for period in periods)
        }
        self.begins_ns = [round(period.from_s * NS_PER_S) for period in periods]
        self.models = [kinds[period.expert_load_cv] for period in periods]

    @property
    def periods(self) -> list[tuple[int, PaceModel]]:
        """When each period begins, and its model."""
        return list(zip(self.begins_ns, self.models, strict=True))

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        """The pace of the present period, which holds until a step begins in the next one."""
        at = bisect_right(self.begins_ns, now_ns)
        pace = self.models[at - 1].pace(now_ns, ranks)
        if at == len(self.begins_ns):
            return pace
        left = ceil((self.begins_ns[at] - now_ns) / max(pace.first_ns, 1.0))
        return pace._replace(steps=min(pace.steps, left))


# -- in the result -----------------------------------------------------------------------------------


class PartBasis(Section):
    """A part of the typical decode step."""

    name: str
    kind: str
    """`linear`, `attention`, `experts`, `exchange`, `host` or `other`."""
    seconds: float
    """What nothing hides."""
    share: float
    """Of the step."""
    evidence: Basis
    """The weakest that prices it."""
    sources: tuple[str, ...]
    """Calibration entries, then assumptions."""


class StepBasis(Section):
    """Where the numbers come from: the load's typical decode step in parts, with what prices each."""

    batch: str
    """Sequences and their tokens, in words."""
    seconds: float
    low_s: float
    """End of the step's 80 % interval."""
    high_s: float
    profiles: tuple[str, ...]
    """Names of the scenario's calibration profile, and of the shipped ones for families that it lacks."""
    parts: tuple[PartBasis, ...]
    """By exposed seconds, the longest first."""
    shares: dict[Basis, float]
    """Share of the step by evidence."""

    def lines(self, time: Callable[[float], str]) -> dict[str, str]:
        """Rows of a summary; `time` writes seconds."""
        kinds = defaultdict[str, list[PartBasis]](list)
        for part in self.parts:
            kinds[part.kind].append(part)
        texts = []
        for kind, parts in sorted(kinds.items(), key=lambda item: -sum(p.seconds for p in item[1])):
            weight = _by_evidence(parts)
            most = max(weight, key=weight.__getitem__)
            seconds = sum(part.seconds for part in parts)
            texts.append(f"{kind} {time(seconds)} ({percent(seconds / self.seconds)}, {most})")
        told = ", ".join(f"{name} {percent(share)}" for name, share in self.shares.items() if share)
        return {
            "decode step": f"{time(self.seconds)} (80 %: {time(self.low_s)} to {time(self.high_s)}) "
            f"for {self.batch}",
            "its parts": ", ".join(texts),
            "evidence": f"{told} of the step; profiles {' and '.join(self.profiles)}",
        }


def step_basis(model: StepModel, served: Served) -> StepBasis:
    """The typical decode step with what prices each part; raises as `typical_step` does."""
    step, one = typical_step(model, served), model.deployment
    seconds, accelerator = step.cost.seconds, one.cluster.accelerator.name
    linear, experts = (ELEMENT_BYTES[fmt] < 1 for fmt in one.formats)
    narrow = {"linear": linear, "experts": experts and one.split.kernels not in ("marlin", "triton")}
    parts = tuple(
        PartBasis(
            name=part.name,
            kind=part.kind,
            seconds=part.exposed_s,
            share=part.exposed_s / seconds,
            evidence=basis_of(part, one.profile, accelerator, narrow.get(part.kind, False)),
            sources=(*sorted(part.evidence.entries), *sorted(part.evidence.notes)),
        )
        for part in sorted(step.cost.parts, key=lambda part: -part.exposed_s)
        if part.exposed_s > 0.0
    )
    lacking = {entry for part in parts for entry in part.sources} - {e.id for e in one.profile.entries()}
    others = [load_profile(name) for name in (SHIPPED, LINKS_PROFILE)]
    shipped = [other.name for other in others if lacking & {entry.id for entry in other.entries()}]
    profiles = tuple(dict.fromkeys([one.profile.name, *shipped]))
    shares = {name: found / seconds for name, found in _by_evidence(parts).items()}
    return StepBasis(
        batch=step.words, seconds=seconds, low_s=step.cost.low, high_s=step.cost.high,
        profiles=profiles, parts=parts, shares=shares,
    )  # fmt: skip


def basis_of(part: StepPart, profile: CalibrationProfile, accelerator: str, narrow: bool = False) -> Basis:
    """The weakest evidence behind a part; a profile's own laws hold for the card on which it is used.

    `narrow`: weights of 4 bits, whose kernels no shipped table has, so that wider ones stand for them.
    """
    order: tuple[Basis, ...] = get_args(Basis)
    found: set[Basis] = {"assumed"} if any("assumed" in note for note in part.evidence.notes) else set()
    kinds = {entry.id: entry.kind for entry in profile.entries()}
    own = {law.id for law in profile.kernel_laws}
    known = {law.id: law for law in laws(profile).values()}
    for entry in part.evidence.entries:
        kind = kinds.get(entry) or (known[entry].kind if entry in known else None)
        if kind == "assumed":
            found.add("assumed")
        elif entry in own or (entry in kinds and profile.name != LINKS_PROFILE):
            found.add("measured" if entry in own or kind != "derived" else "scaled")
        elif entry in known:
            here = kind == "measured" or accelerator in measured_on(known[entry])
            found.add("measured" if here and not narrow else "scaled")
        else:
            found.add("roofline")
    return max(found or {"assumed"}, key=order.index)


def _by_evidence(parts: Iterable[PartBasis]) -> dict[Basis, float]:
    """Seconds by evidence, the best first."""
    seconds: dict[Basis, float] = dict.fromkeys(get_args(Basis), 0.0)
    for part in parts:
        seconds[part.evidence] += part.seconds
    return seconds
