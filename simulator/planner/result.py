"""What a plan search returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from moesim.hwmodels.errors import InputError
from moesim.simulator.planner.refusals import Refusal
from moesim.simulator.predict.result_parts import PoolResult
from moesim.simulator.scenario import Scenario

if TYPE_CHECKING:
    import pandas as pd

Source = Literal["simulated", "closed form"]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One plan: what it is, what it takes, and how sure the time is.

    `time_s` is the engine's where `source` is "simulated", else the closed form's. `margin`: relative
    distance of its objective from the best. `variants`: legal plans that fit and differ from this one only
    in precision, recompute, communication SMs or ZeRO stage (each counted once, whatever its placement).
    `causes_s`: the simulated step by mechanism.
    """

    tp: int
    pp: int
    ep: int
    cp: int
    vpp: int
    dp: int
    expert_tp: int
    microbatch: int
    microbatches: int
    schedule: str
    zero_stage: int
    recompute: str
    precision: str
    sms: int
    placement: str
    """Of the experts: `in order`, or a policy with its redundant experts, as in a space."""
    layers: tuple[int, ...]
    changed: Mapping[str, Any]
    """Scenario keys of `PlanSpace.variants` and their values here."""
    time_s: float
    source: Source
    closed_form_s: float | None
    lower_bound_s: float | None
    """None for a plan that is not from the space: the scenario's own."""
    memory_bytes: float
    capacity_bytes: float
    memory_by_kind_bytes: Mapping[str, float]
    days: float
    gpu_hours: float
    cost_usd: float | None
    energy_j: float | None
    """Of the run, with every accelerator at its board's power limit, times the site's PUE where stated; None
    where nobody published that limit."""
    margin: float
    variants: int
    causes_s: Mapping[str, float]
    scenario: Scenario = field(repr=False, compare=False)
    pools: tuple[PoolResult, ...] = ()
    """What each pool of a fleet does in the simulated step; empty for a single cluster."""

    @property
    def headroom_bytes(self) -> float:
        """Memory left on the fullest GPU."""
        return self.capacity_bytes - self.memory_bytes

    @property
    def label(self) -> str:
        """The field's shorthand for a plan."""
        placed = "" if self.placement == "in order" else f" experts {self.placement}"
        etp = f" ETP{self.expert_tp}" if self.expert_tp > 1 else ""
        return (
            f"TP{self.tp} PP{self.pp} EP{self.ep} CP{self.cp} VPP{self.vpp} DP{self.dp}{etp} "
            f"MBS{self.microbatch} {self.schedule}{placed}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the scenario as a mapping that a scenario file may hold."""
        values = {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "scenario"}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        plain["layers"] = list(self.layers)
        if plain.pop("pools"):
            plain["pools"] = [pool.model_dump(mode="json") for pool in self.pools]
        plain["headroom_bytes"] = self.headroom_bytes
        plain["scenario"] = self.scenario.model_dump(mode="json", exclude_none=True)
        return plain


@dataclass(frozen=True, slots=True)
class Alone:
    """The best plan that was found for one pool alone, same batch; `reason` where there is none."""

    accelerator: str
    n_gpus: int
    plan: PlanRow | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetVerdict:
    """A fleet beside its pools alone.

    `wins`: the fleet's step is shorter than that of every pool alone. `ideal_s`: step if all pools shared the
    work without loss, each at the pace that it has alone (docs/model.md, eq. S5); None where one cannot run
    alone. `reached`: ideal_s over the fleet's step.
    """

    alone: tuple[Alone, ...]
    wins: bool
    ideal_s: float | None
    reached: float | None
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {
                "accelerator": row.accelerator,
                "n_gpus": row.n_gpus,
                "plan": None if row.plan is None else row.plan.to_dict(),
                "reason": row.reason,
            }
            for row in self.alone
        ]
        return {**asdict(self), "alone": rows, "sentences": list(self.sentences)}


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The best plans of a space, what they trade, and why the others were left out.

    `considered` = refused + `fitting` plans; `estimated` of the fitting ones were priced in closed form and
    `simulated` in the engine. Every fitting plan that was not estimated has a lower bound of at least
    `proven_s` seconds (None: all were). `rivals`: families that were not simulated although their closed
    form is within its error of the best, so that the engine might have preferred one of them. On a
    fleet memory is counted only for plans that may be ranked, so refused and fitting plans may be fewer than
    `considered`, and `pareto` is empty.
    """

    objective: str
    ranked: tuple[PlanRow, ...]
    pareto: tuple[PlanRow, ...]
    refused: tuple[Refusal, ...]
    own: PlanRow | None
    """The scenario's own plan, simulated; None where it is illegal or does not fit."""
    own_rank: int | None
    """Its place: one more than the families of plans that are estimated to be faster."""
    considered: int
    legal: int
    fitting: int
    estimated: int
    simulated: int
    price_tables: int
    proven_s: float | None
    rivals: int
    notes: tuple[str, ...]
    evaluated_per_s: float = field(compare=False)
    """Plans bounded a second of this search (wall time); not part of `to_dict`."""
    seconds: Mapping[str, float] = field(compare=False)
    """Wall time by part; not part of `to_dict`."""
    fleet: FleetVerdict | None = None
    """Of a fleet: each pool alone, and what the mix gains or loses."""

    @property
    def best(self) -> PlanRow:
        """The first of the ranked plans."""
        return self.ranked[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the same for the same input; wall times are left out."""
        counts = (
            "considered", "legal", "fitting", "estimated", "simulated", "price_tables", "proven_s", "rivals",
        )  # fmt: skip
        return {
            "objective": self.objective,
            "ranked": [row.to_dict() for row in self.ranked],
            "pareto": [row.to_dict() for row in self.pareto],
            "refused": [asdict(refusal) for refusal in self.refused],
            "own": None if self.own is None else self.own.to_dict(),
            "own_rank": self.own_rank,
            **{key: getattr(self, key) for key in counts},
            "notes": list(self.notes),
            **({} if self.fleet is None else {"fleet": self.fleet.to_dict()}),
        }

    def to_pandas(self) -> pd.DataFrame:
        """The ranked plans as a table. Raises InputError, with the remedy, where pandas is missing."""
        try:
            import pandas as pd
        except ImportError:
            raise InputError("to_pandas() needs pandas: pip install pandas") from None
        rows = [row.to_dict() for row in self.ranked]
        return pd.DataFrame([{k: v for k, v in row.items() if k != "scenario"} for row in rows])
