"""Explains a step time in sentences and a table."""

from __future__ import annotations

from math import fsum

from pydantic import BaseModel, ConfigDict, Field

from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.predict.host_report import HostReport
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.studies.compare import causes
from moesim.simulator.studies.counterfactuals import Counterfactuals


class Cause(BaseModel):
    """Seconds that one cause takes on the critical path, and their share of the step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cause: str
    seconds: float
    share: float


class Explanation(TableResult):
    """Sentences on a step, its critical path by cause, and the inputs that are assumed or extrapolated."""

    scenario: str
    inputs: Inputs
    sentences: tuple[str, ...]
    causes: tuple[Cause, ...]
    extrapolated: tuple[str, ...]
    defaults: tuple[Default, ...] = Field((), exclude_if=lambda value: not value)
    """Keys that the scenario left out, with the values that they got and the reasons."""
    counterfactuals: Counterfactuals | None = Field(None, exclude_if=lambda value: value is None)
    """Step times with one cause switched off each; None for an explanation of a finished result."""

    def rows(self) -> list[Row]:
        """One row for each cause."""
        return [cause.model_dump() for cause in self.causes]

    def __str__(self) -> str:
        """The sentences, then the causes that take or cost at least one per cent of the step."""
        lines = [*self.sentences, ""]
        lines += [f"{c.cause:20s} {c.seconds:8.3f} s  {c.share:6.1%}" for c in self.causes if c.share >= 0.01]
        if self.counterfactuals is not None:
            lines += ["", str(self.counterfactuals)]
        return "\n".join(lines)


def host_sentence(host: HostReport, step_s: float) -> str:
    """Sentence on whether the host's launch rate bounds the step, and on the seconds that launches cost."""
    verdict = "bound by the host's launch rate" if host.bound else "not bound by the host's launch rate"
    remedy = "; CUDA graphs, larger micro-batches or a faster host would help" if host.bound else ""
    return (
        f"The run is {verdict}: the GPUs wait {host.wait_s:.3f} s of {step_s:.3f} s ({host.share:.1%}) for "
        f"launches of {host.host}{remedy}."
    )


def explain(result: Result, counterfactuals: Counterfactuals | None = None) -> Explanation:
    """Explain a finished prediction from its bounds, breakdown, critical path and memory.

    `counterfactuals`: the runs of the same step without each of its causes, if they were made.
    """
    step, split, memory, use = result.step, result.breakdown_s, result.memory, result.utilisation
    path = sorted(causes(result).items(), key=lambda item: (-item[1], item[0]))
    compute = fsum(s for name, s in path if name.split()[0] in ("attn", "mlp") or name == "optimizer")
    top = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in path[:3])
    over_best, of_worst = step.time_s / step.lower_bound_s, step.time_s / step.upper_bound_s
    waits = split.exposed_communication
    says = [
        f"A step takes {step.time_s:.3f} s: {over_best:.2f} times what the busiest resource needs at its "
        f"best ({step.lower_bound_s:.3f} s), and {of_worst:.0%} of everything in series at its worst "
        f"({step.upper_bound_s:.3f} s).",
        f"{compute / step.time_s:.0%} of its critical path is compute; the longest parts are {top}.",
        f"Pipeline rank 0 idles {split.bubble:.2f} s in the bubble ({split.bubble / step.time_s:.1%}) and "
        f"waits {waits:.2f} s for communication ({waits / step.time_s:.1%}).",
        f"Communication SMs are busy {use.communication_partition:.0%} of the step, NICs {use.nic:.0%}, "
        f"scale-up ports {use.scale_up:.0%}.",
        f"The fullest GPU holds {memory.total_bytes / 2**30:.1f} of {memory.capacity_bytes / 2**30:.1f} GiB"
        + " ({:.1f} to {:.1f} by framework and allocator)".format(*(b / 2**30 for b in memory.range_bytes))
        + {"fits": ": it fits.", "at risk": ": it is at risk.", "does not fit": ": it does not fit."}[
            memory.verdict
        ],
    ]
    if result.host is not None:
        says.append(host_sentence(result.host, step.time_s))
    if result.uncertainty is not None:
        band, first = result.uncertainty.bands["step_time_s"], result.uncertainty.sources[0]
        says.append(
            f"With probability 0.8 the step is {band.p10:.2f} to {band.p90:.2f} s; most of that is "
            f"{first.source}."
        )
    if result.defaults:
        keys = ", ".join(item.key for item in result.defaults)
        says.append(f"{len(result.defaults)} keys have defaults that nobody stated: {keys}.")
    if result.extrapolated:
        says.append(f"{len(result.extrapolated)} inputs are assumed or extrapolated.")
    total = step.time_s
    return Explanation(
        scenario=result.scenario,
        inputs=result.inputs,
        sentences=tuple(says),
        causes=tuple(Cause(cause=name, seconds=s, share=s / total) for name, s in path),
        extrapolated=result.extrapolated,
        defaults=result.defaults,
        counterfactuals=counterfactuals,
    )
