"""The result of a prediction; `simulate --json` prints `Result.model_dump()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, computed_field, model_validator

from moesim.hwmodels.confidence import Confidence
from moesim.hwmodels.frozen import Documented
from moesim.hwmodels.summary_text import count, gib, percent, short, titled
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.engine.full_resolution.result import FullResult
from moesim.simulator.predict.figures import figures
from moesim.simulator.predict.result_parts import (
    Breakdown,
    CauseRow,
    HostReport,
    Later,
    MemoryResult,
    MovedBytes,
    PhaseSpan,
    PoolResult,
    ProvenanceEntry,
    RunResult,
    StepEnergy,
    StepResult,
    TierCost,
    Utilisation,
)
from moesim.simulator.predict.work_size import Uncertainty
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.inputs import Inputs

SCHEMA_VERSION = 1

MOST_CAUSES = 4
"""Causes of the critical path that a printed result names."""


class Result(Later, TableResult, Documented):
    """The result of a prediction; its fields are the keys that `simulate --json` prints."""

    scenario: str
    """Name of the scenario."""
    inputs: Inputs
    """What the prediction is of: scenario, overrides, plan, engine and version; `moesim.load` reads it."""
    step: StepResult
    """Time, rates, MFU and bounds of one step."""
    breakdown_s: Breakdown
    """Seconds of pipeline rank 0 by category."""
    breakdown_by_rank_s: tuple[Breakdown, ...]
    """Seconds by category for every pipeline rank."""
    breakdown_split_w_s: Breakdown
    """Mean over pipeline ranks, with the weight gradients of a full B moved to `backward_weight`."""
    forward_backward_pair_s: float | None
    """Mean seconds of the overlapped pairs; null where the schedule has no pairs."""
    pair_phases: tuple[PhaseSpan, ...]
    """Mean duration of each phase of MoE blocks inside overlapped pairs."""
    utilisation: Utilisation
    """Busy fractions of SMs and links over the step."""
    moved_bytes: tuple[MovedBytes, ...] = Field((), exclude_if=lambda value: not value)
    """What each pipeline rank's GPUs send over NICs and scale-up links in a step, collectives included."""
    critical_path_s: tuple[CauseRow, ...]
    """Seconds of the critical path by cause, largest first."""
    memory: MemoryResult
    """Memory of the fullest GPU, and whether the plan fits."""
    run: RunResult
    """Duration and cost of the run that consists of such steps."""
    stages: tuple[str, ...]
    """Blocks of every pipeline stage, in words."""
    profile: str
    """Name of the calibration profile."""
    profile_hash: str
    """Hash of the profile's content."""
    confidence: Confidence
    """Level of the evidence behind the GEMM rates (`moesim.hwmodels.confidence`)."""
    confidence_reason: str
    """Why the confidence has this level."""
    warnings: tuple[str, ...]
    """What makes the prediction less reliable, in sentences."""
    provenance: tuple[ProvenanceEntry, ...]
    """Every number and curve behind the prediction, with its source."""
    extrapolated: tuple[str, ...]
    """Inputs that were assumed, or read outside the range of their source."""
    seed: int
    """Seed of every random draw."""
    version: str
    """Version of moesim."""
    full: FullResult | None = None
    """Figures of every GPU in full resolution; null in folded resolution."""
    network: tuple[TierCost, ...] = Field((), exclude_if=lambda value: not value)
    """What each limited level of the network costs the step; left out where nothing limits NICs."""
    energy: StepEnergy | None = Field(None, exclude_if=lambda value: value is None)
    """Power of a board by what runs, and joules per token; left out for fleets and unknown power limits."""
    host: HostReport | None = Field(None, exclude_if=lambda value: value is None)
    """Launch stalls of the step, where the scenario names a host."""
    uncertainty: Uncertainty | None = Field(None, exclude_if=lambda value: value is None)
    """Intervals, where they were requested; otherwise left out of the output."""
    defaults: tuple[Default, ...] = Field((), exclude_if=lambda value: not value)
    """Keys that the scenario omits, with their values and reasons; left out where it states all keys."""
    pools: tuple[PoolResult, ...] = Field((), exclude_if=lambda value: not value)
    """Results of each pool of a fleet; left out of the output of a single cluster."""
    schema_version: int = SCHEMA_VERSION
    """Version of these keys."""

    @model_validator(mode="before")
    @classmethod
    def _old_name(cls, data: Any) -> Any:
        """Accept `breakdown_alternative_s`, the name of `breakdown_split_w_s` in results of version 0.1.0."""
        if not isinstance(data, Mapping) or "breakdown_alternative_s" not in data:
            return data
        rest = dict(data)
        old = rest.pop("breakdown_alternative_s")
        return {"breakdown_split_w_s": old, **rest}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def breakdown_alternative_s(self) -> Breakdown:
        """The old name of `breakdown_split_w_s` in JSON, kept for one version."""
        return self.breakdown_split_w_s

    def __str__(self) -> str:
        """The main figures with their units, in about ten lines."""
        return _text(self)

    def rows(self) -> list[Row]:
        """One row with the main figures."""
        row: Row = {"scenario": self.scenario, **figures(self)}
        for name, band in self.uncertainty.bands.items() if self.uncertainty else ():
            row |= {f"{name}_p10": band.p10, f"{name}_p50": band.p50, f"{name}_p90": band.p90}
        return [row]


def _text(result: Result) -> str:
    """The main figures of a prediction with their units, in about ten lines."""
    step, memory = result.step, result.memory
    causes = ", ".join(f"{row.cause} {row.seconds:.2f}" for row in result.critical_path_s[:MOST_CAUSES])
    split, bands = result.breakdown_s, result.uncertainty.bands if result.uncertainty else {}
    band = bands.get("step_time_s")
    counted = [
        count(len(result.warnings), "warning"),
        f"{count(len(result.extrapolated), 'input')} assumed or extrapolated",
    ]
    return titled(
        "\n".join(
            [
                f"{result.scenario} (profile {result.profile}, confidence {result.confidence})",
                *result.inputs.lines(),
            ]
        ),
        {
            "step time": f"{step.time_s:.3f} s, between the bounds {step.lower_bound_s:.3f} s and "
            f"{step.upper_bound_s:.3f} s",
            "interval": f"P10 {band.p10:.3f} s, P50 {band.p50:.3f} s, P90 {band.p90:.3f} s" if band else "",
            "throughput": f"{short(step.tokens_per_s)} tokens/s, {step.tokens_per_s_per_gpu:,.0f} "
            "tokens/s/GPU",
            "MFU": f"{percent(step.mfu_causal)} causal, {percent(step.mfu_noncausal)} non-causal",
            "memory": f"{gib(memory.total_bytes)} of {gib(memory.capacity_bytes)} GiB on the fullest GPU: "
            f"{memory.verdict}, {gib(memory.range_bytes[0])} to {gib(memory.range_bytes[1])} reserved",
            "run": str(result.run).replace("\n", "; "),
            "rank 0": f"bubble {split.bubble:.2f} s, waiting for communication "
            f"{split.exposed_communication:.2f} s",
            "longest": f"{causes} s on the critical path",
            "evidence": ", ".join(counted),
            "more": ".to_dict(), .to_pandas(), moesim.explain(result)",
        },
    )
