"""The text with which a prediction and its run print themselves (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.simulator.common.summary_text import count, gib, percent, short, titled

if TYPE_CHECKING:
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.result_parts import RunResult

MOST_CAUSES = 4
"""Causes of the critical path that a printed result names."""


def result_text(result: Result) -> str:
    """The main figures of a prediction with their units, in about ten lines."""
    step, memory = result.step, result.memory
    tight = memory.verdict == "tight"
    fits = ("fits, tightly" if tight else "fits") if memory.fits else "does not fit"
    causes = ", ".join(f"{row.cause} {row.seconds:.2f}" for row in result.critical_path_s[:MOST_CAUSES])
    split, bands = result.breakdown_s, result.uncertainty.bands if result.uncertainty else {}
    band = bands.get("step_time_s")
    counted = [
        count(len(result.warnings), "warning"),
        f"{count(len(result.extrapolated), 'input')} assumed or extrapolated",
    ]
    return titled(
        f"{result.scenario} (profile {result.profile}, confidence {result.confidence})",
        {
            "step time": f"{step.time_s:.3f} s, between the bounds {step.lower_bound_s:.3f} s and "
            f"{step.upper_bound_s:.3f} s",
            "interval": f"P10 {band.p10:.3f} s, P50 {band.p50:.3f} s, P90 {band.p90:.3f} s" if band else "",
            "throughput": f"{short(step.tokens_per_s)} tokens/s, {step.tokens_per_s_per_gpu:,.0f} "
            "tokens/s/GPU",
            "MFU": f"{percent(step.mfu_causal)} causal, {percent(step.mfu_noncausal)} non-causal",
            "memory": f"{gib(memory.total_bytes)} of {gib(memory.capacity_bytes)} GiB on the fullest GPU: "
            f"{fits}",
            "run": str(result.run).replace("\n", "; "),
            "rank 0": f"bubble {split.bubble:.2f} s, waiting for communication "
            f"{split.exposed_communication:.2f} s",
            "longest": f"{causes} s on the critical path",
            "evidence": ", ".join(counted),
            "more": ".to_dict(), .to_pandas(), moesim.explain(result)",
        },
    )


def run_text(run: RunResult) -> str:
    """Duration, GPU-hours and cost of the main phase, and of the whole run where it was reported."""
    lines = [
        f"{short(run.tokens)} tokens in {run.steps:,} steps: {run.days:.1f} days, "
        f"{short(run.gpu_hours)} GPU-hours{_dollars(run.cost_usd)}"
    ]
    if run.report is not None:
        days, cost = run.report.days, run.report.cost_usd
        lines.append(
            f"with interruptions {days.predicted:.1f} days{_dollars(cost.predicted if cost else None)}"
        )
    return "\n".join(lines)


def _dollars(value: float | None) -> str:
    return ", no price known" if value is None else f", ${short(value)}"
