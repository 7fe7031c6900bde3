"""The text that `simulate` and `explain` print. No model in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from moesim.cli.console import default_lines, print_raw, print_table, print_text, table_lines
from moesim.cli.full_resolution import full_text
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.summary_text import percent, short

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanResult
    from moesim.simulator.predict.provenance import PlanSummary
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.result_parts import PoolResult, ProvenanceEntry
    from moesim.simulator.predict.step import Prepared
    from moesim.simulator.scenario import Scenario
    from moesim.simulator.studies.explain import Counterfactuals


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def summary(plan: PlanSummary, result: Result) -> str:
    """Summary of a prediction in about 25 lines: figures, breakdown, critical path and evidence."""
    rows = _named_figures(result, plan.peak_flop_per_s / 1e12)
    if plan.scenario.stages.blocks is not None:  # a part of the model has no cost of a token or a run
        rows = {name: rows[name] for name in ("step time", "memory")}
    lines = [plan.headline, "", *(f"{name:<12}{text}" for name, text in rows.items()), ""]
    if result.pools:
        lines += [*table_lines(POOL_HEADERS, [_pool_cells(p) for p in result.pools], right=POOL_NUMBERS), ""]
    lines += [*breakdown_lines(result), ""]
    if result.run.report is not None:
        from moesim.cli.run import report_lines

        lines += [*report_lines(result.run.report), ""]
    lines += [*_published(plan.scenario, result), *reason_lines(result), ""]
    if result.full is not None:
        lines += [*full_text(result.full), ""]
    return "\n".join([*lines, *footing_lines(result)])


def _named_figures(result: Result, peak_tflops: float) -> dict[str, str]:
    """The main figures by name; `peak_tflops` is that of a mean GPU."""
    step, run, memory = result.step, result.run, result.memory
    cost = "no price known" if run.cost_usd is None else f"${short(run.cost_usd)}"
    kinds = sorted(memory.by_kind_bytes.items(), key=lambda item: (-item[1], item[0]))
    parts = ", ".join(f"{kind.replace('_', ' ')} {_gib(size)}" for kind, size in kinds if size >= 2**29)
    replayed = ""
    if memory.active_bytes is not None and memory.reserved_bytes is not None:
        replayed = f"; {_gib(memory.active_bytes)} active and {_gib(memory.reserved_bytes)} reserved"
        replayed += " at the peaks of PyTorch's allocator"
    return {
        "step time": f"{step.time_s:.3f} s; bounds {step.lower_bound_s:.3f} s (busiest resource at its best) "
        f"and {step.upper_bound_s:.3f} s (all in series)",
        "throughput": f"{step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {short(step.tokens_per_s)} tokens/s, "
        f"{short(step.tokens_per_day)} tokens/day",
        "MFU": f"{percent(step.mfu_causal)} causal, {percent(step.mfu_noncausal)} non-causal "
        f"({step.tflops_per_gpu_causal:.0f} and {step.tflops_per_gpu_noncausal:.0f} TFLOP/s of "
        f"{peak_tflops:.0f})",
        "run": f"{short(run.tokens)} tokens in {run.steps:,} steps: {run.days:.1f} days, "
        f"{short(run.gpu_hours)} GPU-hours, {cost}, without failures (moesim run adds them)",
        "memory": f"{_gib(memory.total_bytes)} of {_gib(memory.capacity_bytes)} GiB on the fullest GPU: "
        f"{FITS[memory.verdict]} ({parts}); {_gib(memory.range_bytes[0])} to "
        f"{_gib(memory.range_bytes[1])} by framework and allocator{replayed}",
        **({} if memory.risk is None else {"risk": memory.risk.removeprefix("at risk: ")}),
    }


FITS = {"fits": "fits", "at risk": "AT RISK", "does not fit": "DOES NOT FIT"}
"""Text of a verdict on memory."""

CATEGORIES = {
    "forward": "forward",
    "backward_input": "backward, input gradient",
    "backward_weight": "backward, weight gradient",
    "forward_backward": "overlapped pairs",
    "bubble": "bubble",
    "optimizer": "gradients and optimizer",
    "exposed_communication": "of these: waiting for communication",
}


def breakdown_lines(result: Result) -> list[str]:
    """The breakdown of the step as a table."""
    from moesim.simulator.predict.report import mean_breakdown

    mean = mean_breakdown(list(result.breakdown_by_rank_s))
    lines = [f"{'where the step goes, seconds':<38}{'rank 0':>9}{'mean':>9}{'of step':>10}"]
    for key, name in CATEGORIES.items():
        first, average = getattr(result.breakdown_s, key), getattr(mean, key)
        lines.append(f"  {name:<36}{first:>9.3f}{average:>9.3f}{percent(average / result.step.time_s):>10}")
    if result.forward_backward_pair_s is not None:
        lines.append(
            f"  {'one overlapped pair, milliseconds':<45}{1e3 * result.forward_backward_pair_s:>9.1f}"
        )
    return lines


def _published(scenario: Scenario, result: Result) -> list[str]:
    """The published figures of this job with the prediction and its errors; no line for another job."""
    from moesim.simulator.scoring.published import beside_published

    rows = beside_published(scenario, result)
    if not rows:
        return []
    cells = []
    for row in rows:
        quantity = f"{row.quantity}{'' if row.unit == '1' else f', {row.unit}'}"
        mark = " (calibrated on it)" if row.used_for_calibration else ""
        numbers = (f"{row.published:.4g}", f"{row.predicted:.4g}", f"{row.relative_error:+.1%}")
        cells.append((f"{quantity}{mark}", *numbers))
    headers = ("against what was published", "published", "predicted", "error")
    return [*table_lines(headers, cells, right=(1, 2, 3)), ""]


def reason_lines(result: Result) -> list[str]:
    """The critical path and the utilisation of SMs and links."""
    used = result.utilisation
    causes = [f"{row.cause} {row.seconds:.2f}" for row in result.critical_path_s[:8]]
    more = len(result.critical_path_s) - len(causes)
    busy = {
        "compute SMs": used.compute_partition,
        "communication SMs": used.communication_partition,
        "scale-up links": used.scale_up,
        "NICs": used.nic,
    }
    return [
        f"critical path, seconds: {', '.join(causes)}{f', {more} more' if more > 0 else ''}",
        f"busy: {', '.join(f'{name} {percent(share)}' for name, share in busy.items())}",
    ]


def footing_lines(result: Result) -> list[str]:
    """The evidence behind a prediction: profile, seed, confidence, assumptions and warnings."""
    kinds = Counter(entry.kind for entry in result.provenance)
    counted = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    assumed = [_named(entry) for entry in result.provenance if entry.kind == "assumed"]
    lines = [
        f"stands on profile {result.profile} ({result.profile_hash[:12]}), seed {result.seed}; "
        f"numbers: {counted}"
    ]
    lines.append(f"confidence {result.confidence_reason}")
    lines += default_lines(result)
    lines += _first("assumed", assumed)
    lines += _first("extrapolated", list(result.extrapolated))
    return lines + [f"warning: {text}" for text in result.warnings]


def _first(what: str, items: Sequence[str], most: int = 2) -> list[str]:
    if not items:
        return [f"{what}: nothing"]
    more = f"; {len(items) - most} more (moesim explain lists them)" if len(items) > most else ""
    return [f"{what} ({len(items)}): {'; '.join(items[:most])}{more}"]


def _named(entry: ProvenanceEntry) -> str:
    from moesim.hwmodels.units import format_quantity

    return entry.path if entry.value is None else f"{entry.path} = {format_quantity(entry.value, entry.unit)}"


def print_explanation(
    prepared: Prepared, result: Result, counterfactuals: Counterfactuals | None = None
) -> None:
    """Print the details of a prediction that the summary only counts, and what its causes cost."""
    from moesim.simulator.predict.provenance import summary_of_prepared
    from moesim.simulator.studies.explain import memory_sentence

    headline = summary_of_prepared(prepared).headline
    step, time_s = result.step, result.step.time_s
    print_text(f"{headline}\nstep time {time_s:.3f} s\n\ncritical path: what the step waits for")
    causes = [
        (row.cause, f"{row.seconds:.3f}", percent(row.seconds / time_s)) for row in result.critical_path_s
    ]
    print_table(("cause", "seconds", "share"), causes, right=(1, 2))
    if counterfactuals is not None:
        from moesim.cli.studies import print_counterfactuals

        print_counterfactuals(counterfactuals)
    print_text("\nwhere each pipeline rank's step goes, seconds")
    named = {str(rank): row for rank, row in enumerate(result.breakdown_by_rank_s)}
    named["mean*"] = result.breakdown_split_w_s
    ranks = [(name, *(f"{getattr(row, key):.3f}" for key in CATEGORIES)) for name, row in named.items()]
    print_table(("rank", *(key.replace("_", " ") for key in CATEGORIES)), ranks, right=range(8))
    print_text("mean*: over the ranks, weight gradients of full backward chunks counted as such")
    if result.pair_phases:
        print_text("\ninside an overlapped pair (MoE blocks), milliseconds each")
        spans = [(p.phase, f"{1e3 * p.seconds:.3f}", f"{1e3 * p.wait_s:.3f}") for p in result.pair_phases]
        print_table(("phase", "duration", "wait at barrier"), spans, right=(1, 2))
    if result.full is not None:
        print_text("\n" + "\n".join(full_text(result.full)))
        print_text(
            "\nskew along a pair: wait at the barrier before each transfer, milliseconds over all GPUs"
        )
        skew = [
            (row.phase, str(row.layer), *(f"{1e3 * v:.2f}" for v in (row.p10_s, row.p50_s, row.p90_s)))
            for row in result.full.skew
        ]
        print_table(("transfer", "layer", "10 %", "50 %", "90 %"), skew, right=(1, 2, 3, 4))
    print_text(f"\nmemory: {memory_sentence(result.memory)}")
    print_text(
        f"\nbounds: {step.lower_bound_s:.3f} s if the busiest resource ran at its best rates all the time, "
        f"{step.upper_bound_s:.3f} s with every action in series at its worst rates\n\nstages"
    )
    # A line for each run of equal stages, such as `stages 1 to 30: 1 moe`.
    for layers, run in groupby((text.split(": ", 1) for text in result.stages), key=itemgetter(1)):
        names = [name for name, _ in run]
        last = names[-1].removeprefix("stage ")
        several = f"{names[0].replace('stage', 'stages')} to {last}"
        print_text(f"  {names[0] if len(names) == 1 else several}: {layers}")
    _print_footing(result)
    if not prepared.of_fleet:
        _print_imported(prepared)
    if result.pools:
        print_text("\npools")
        print_pools(result.pools)


def _print_imported(prepared: Prepared) -> None:
    """Print the imported curves with what they replaced, and the old and new values where they were read."""
    from moesim.simulator.predict.provenance import imported_readings

    readings = imported_readings(prepared)
    if not readings:
        return
    print_text("\nimported curves: what they replaced, at the sizes of this plan")
    unread = [f"{r.entry} ({r.replaced})" for r in readings if r.at is None]
    if unread:
        print_text(f"  not read by this plan: {'; '.join(unread)}")
    rows = [
        (
            r.entry,
            f"{r.at:.4g} {r.at_unit}",
            "" if r.old is None else f"{r.old:.4g}",
            "" if r.new is None else f"{r.new:.4g} {'' if r.unit == '1' else r.unit}".strip(),
            r.replaced,
            r.source,
        )
        for r in readings
        if r.at is not None
    ]
    if rows:
        print_table(("entry", "at", "old", "new", "replaced", "source"), rows, right=(1, 2, 3))


def _print_footing(result: Result) -> None:
    for line in default_lines(result):
        print_text(line)
    print_text(f"\nprofile {result.profile}, hash {result.profile_hash}\nnumbers by kind of evidence")
    by_kind: dict[str, list[ProvenanceEntry]] = {}
    for entry in result.provenance:
        by_kind.setdefault(entry.kind, []).append(entry)
    for kind, entries in sorted(by_kind.items()):
        print_text(f"  {kind}: {len(entries)}")
        if kind == "assumed":
            for entry in entries:
                print_text(f"    {_named(entry)}: {entry.source}")
    print_text(f"extrapolated or without a measurement: {len(result.extrapolated)}")
    for text in result.extrapolated:
        print_text(f"    {text}")
    for text in result.warnings:
        print_text(f"warning: {text}")


# -- fast --------------------------------------------------------------------------------------------
# Prints the closed-form estimate of `simulate --fast`. No model in here.


def print_estimate(loaded: Scenario, scenario: str, beside: Mapping[str, object], *, as_json: bool) -> None:
    """Print the estimate of a scenario. `beside`: further options of the command by name, with their values.

    Raises InputError for options that need the engine and for what the closed form cannot price, and
    InfeasibleError, after the estimate was printed, for a plan that does not fit into memory.
    """
    given = [name for name, value in beside.items() if value]
    if given:
        raise InputError(
            f"{' and '.join(given)}: an estimate in closed form (--fast) has none; leave out --fast"
        )
    from moesim.simulator.planner.estimate import estimate

    try:
        result = estimate(loaded)
    except InputError as error:
        raise InputError(f"{scenario}: {error}") from None
    if as_json:
        print_raw(result.model_dump_json(indent=2))
    else:
        print_text("\n".join([str(result), *default_lines(result)]))
    if not result.memory.fits:
        raise InfeasibleError(f"{result.scenario}: {result.memory.shortage}")


# -- fleet -------------------------------------------------------------------------------------------
# Prints the pools of a fleet for `simulate`, `explain` and `plan`.


def refuse_for_fleet(asked: dict[str, object]) -> None:
    """Raise InputError for options that a fleet's prediction does not support.

    `asked`: the value of every such option; None or False if it was not given.
    """
    given = [name for name, value in asked.items() if value is not None and value is not False]
    if "--uncertainty" in given:
        raise InputError(
            "--uncertainty needs one cluster: the errors of several profiles are not combined; leave it out, "
            "or give one cluster in the place of fleet"
        )
    if given:
        raise InputError(
            "traces and pictures of a fleet are not drawn: leave --trace, --trace-per-rank, --ranks, "
            "--members and --picture out, or give one cluster in the place of fleet"
        )


POOL_HEADERS = ("pool", "GPUs", "ranks", "layers", "ms a layer", "bubble s", "GiB", "profile")
POOL_NUMBERS = (1, 3, 4, 5)
"""Columns of numbers."""


def _pool_cells(pool: PoolResult) -> tuple[str, ...]:
    memory = pool.memory
    fits = {"fits": "", "at risk": " AT RISK", "does not fit": " DOES NOT FIT"}[memory.verdict]
    return (
        pool.accelerator,
        f"{pool.n_gpus:,}",
        f"{pool.first_rank} to {pool.last_rank}",
        str(pool.layers),
        f"{1e3 * pool.layer_s:.2f}",
        f"{pool.bubble_s:.2f}",
        f"{_gib(memory.total_bytes)} of {_gib(memory.capacity_bytes)}{fits}",
        pool.profile,
    )


def print_pools(pools: tuple[PoolResult, ...]) -> None:
    """Print the pools as a table."""
    print_table(POOL_HEADERS, [_pool_cells(pool) for pool in pools], right=POOL_NUMBERS)


def print_verdict(result: PlanResult) -> None:
    """Print the pools of the best plan, and the comparison of the fleet with each pool alone."""
    print_text("\npools of the best plan")
    print_pools(result.best.pools)
    if result.fleet is not None:
        print_text("\nis the mix worth it?")
        print_text("\n".join(f"  {sentence}" for sentence in result.fleet.sentences))
