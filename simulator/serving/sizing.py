"""Sizing: the fewest GPUs, or the lowest price, that serve a load within the limits of its users.

Every kind of replica is priced by the step model and judged in closed form; the best few are then served
request by request, with more or fewer replicas until the limits are just met. What is printed comes from the
events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, inf, log10
from typing import Any

import numpy as np

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.processes import engine_processes, outcomes
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.scenario.defaults import accelerator_named
from moesim.simulator.scenario.inputs import inputs_of
from moesim.simulator.serving.candidates import (
    BUDGETS,
    FORMATS,
    MODES,
    SEQUENCES,
    Option,
    PricedKinds,
    PricingJob,
    front,
    frontier,
    kinds,
    options_of,
    pool_text,
    price,
    space_of,
)
from moesim.simulator.serving.closed_form import Candidate, DecodingPool, PromptPool, fewest, moments
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.requests import load_requests
from moesim.simulator.serving.sized import (
    FigureRange,
    ServedFamily,
    ServingPlan,
    SizedRow,
    Tried,
    family_of,
    limits_text,
    settle,
)

OBJECTIVES = ("cost", "gpus")
MOST_GPUS = 1024
"""GPUs of an accelerator that `max_gpus` does not limit."""

Tell = Callable[[str], None]


def machines(scenario: Scenario, accelerators: Sequence[str], most: int | None) -> list[Scenario]:
    """The scenario on each accelerator with its usual node and price; on its own cluster without any.

    An accelerator may be named in short (`h100` for `h100-sxm`). Raises InputError for an unknown one.
    """
    if not accelerators:
        return [scenario]
    found = []
    for name in map(accelerator_named, accelerators):
        own = scenario.machine
        if own.accelerator.name == name:
            found.append(scenario)
            continue
        node_gpus = _node_gpus(scenario, name)
        nodes = max(ceil((most or MOST_GPUS) / node_gpus), 1)
        found.append(scenario.replace(cluster={"accelerator": name, "nodes": nodes}))
    return found


def _node_gpus(scenario: Scenario, accelerator: str) -> int:
    return scenario.replace(cluster={"accelerator": accelerator, "nodes": 1}).machine.node.n_gpus


def serve_plan(
    scenario: AnyScenario,
    *overrides: str,
    objective: str = "cost",
    accelerators: Sequence[str] = (),
    vary: Mapping[str, Any] | None = None,
    modes: Sequence[str] = MODES,
    max_gpus: int | None = None,
    top: int = 5,
    workers: int = 1,
    scheduler: str | None = None,
    progress: Tell = lambda text: None,
) -> ServingPlan:
    """The cheapest plans, or those of fewest GPUs, that serve a scenario's load within its limits.

    `scenario` and overrides: as for `moesim.load`; its section `serving` has the load (a rate or a log), the
    limits, and every key that is not varied. `objective`: cost or gpus. `accelerators`: names, each with its
    usual node and price; absent, the scenario's cluster. `vary`: values by key of `serving` (`1..8:x2`, a
    list); degrees and limits of the scheduler are varied by rule. `modes`: one pool for all work, or pools
    for prompts and decodes. `max_gpus`: of each accelerator. `top`: plans that are served and listed.
    `workers`: processes; `scheduler`: address of a Dask cluster to use instead. Raises
    InputError for what cannot be searched, InfeasibleError, with the nearest limits that something meets,
    where no plan does.
    """
    loaded = load_scenario(scenario, overrides)
    _check(loaded, objective, modes, top, max_gpus)
    search = _Search(
        loaded,
        objective,
        machines(loaded, accelerators, max_gpus),
        space_of(vary or {}),
        tuple(modes),
        max_gpus,
        top,
    )
    return search.run(workers, progress, scheduler)


def _check(scenario: Scenario, objective: str, modes: Sequence[str], top: int, max_gpus: int | None) -> None:
    for key, value, known in (
        ("objective", objective, OBJECTIVES),
        *(("modes", mode, MODES) for mode in modes),
    ):
        if value not in known:
            raise InputError(
                f"{key}={value!r} is not one of {', '.join(known)}{nearest(str(value), list(known))}", key=key
            )
    if not modes:
        raise InputError(f"modes names none; give one or more of {', '.join(MODES)}", key="modes")
    if not 1 <= top <= 100:
        raise InputError(f"top={top} must lie between 1 and 100", key="top")
    if max_gpus is not None and max_gpus < 1:
        raise InputError(f"max_gpus={max_gpus} must be 1 or more", key="max_gpus")
    if scenario.serving is None:
        raise InputError(
            f"scenario {scenario.name} has no section `serving`; add one, such as serving: {{tp: 8}}"
        )
    load = scenario.serving.load
    if load.arrivals == "concurrency":
        raise InputError(
            "serve plan sizes for a rate, and serving.load is a closed loop (arrivals: concurrency), whose "
            "rate the replicas make; state serving.load.rate_per_s with arrivals: poisson, or a log"
        )


class _Search:
    """A sizing: machines, space and goal."""

    def __init__(
        self,
        scenario: Scenario,
        objective: str,
        places: list[Scenario],
        space: dict[str, tuple[Any, ...]],
        modes: tuple[str, ...],
        max_gpus: int | None,
        top: int,
    ) -> None:
        assert scenario.serving is not None, "checked"
        self.scenario, self.objective, self.places, self.space = scenario, objective, places, space
        self.modes, self.max_gpus, self.top = modes, max_gpus, top
        serving = scenario.serving
        self.limits = serving.limits
        requests = load_requests(serving.load, scenario.seed, scenario.path)
        self.load = moments(requests, serving.load.rate_per_s, serving.prefix_caching)
        self.roles = (("both",) if "aggregated" in modes else ()) + (
            ("decode", "prefill") if "disaggregated" in modes else ()
        )

    def most(self, place: Scenario) -> int:
        """GPUs that a machine has."""
        return min(self.max_gpus or place.machine.n_gpus, place.machine.n_gpus)

    def run(self, workers: int, progress: Tell, scheduler: str | None = None) -> ServingPlan:
        """Price, judge and serve."""
        with engine_processes(workers, scheduler) as pool:
            jobs = [(n, job) for n in range(len(self.places)) for job in self._jobs(n)]
            progress(f"pricing {sum(len(job.kinds) for _, job in jobs)} kinds of replica")
            priced: list[PricedKinds | None] = [None] * len(jobs)
            for at, made in outcomes(pool, price, [job for _, job in jobs]):
                priced[at] = made
            by_place: list[dict[str, list[Candidate]]] = [{} for _ in self.places]
            refused: Counter[str] = Counter()
            for (place, _), one in zip(jobs, priced, strict=True):
                assert one is not None
                refused += one.refused
                for role, candidates in one.by_role.items():
                    by_place[place].setdefault(role, []).extend(candidates)
            options = [
                (n, option)
                for n, by_role in enumerate(by_place)
                for option in options_of(by_role, self.load, self.limits, self.most(self.places[n]))
            ]
            considered = sum(
                len(by.get("both", [])) + len(by.get("decode", [])) * len(by.get("prefill", []))
                for by in by_place
            )
            if not considered:
                reasons = "; ".join(f"{n:,} times: {why}" for why, n in refused.most_common(5))
                raise InfeasibleError(
                    f"no replica can be: {reasons}; raise --max-gpus, widen the degrees, or vary the formats"
                )
            if not options:
                raise InfeasibleError(self._nearest(by_place))
            chosen = self._chosen(options)
            families = [
                family_of(self.places[n], option, tuple(self.space), self.load, self.most(self.places[n]))
                for n, option in chosen
            ]
            tried: list[list[Tried]] = [[] for _ in families]
            for done, (at, served) in enumerate(outcomes(pool, settle, families)):
                tried[at] = served
                progress(f"served {done + 1} of {len(families)} plans request by request")
        return self._result(by_place, options, considered, refused, chosen, families, tried)

    def _jobs(self, n: int) -> list[PricingJob]:
        place = self.places[n]
        assert place.serving is not None, "checked"
        serving = place.serving.model_copy(update={"prefill": None})
        machine = Deployment(place.shape, place.machine, place.calibration, serving, serving)
        found = kinds(machine, self.space, self.most(place))
        if not found:
            raise InputError(
                f"serve plan: no degrees of the space fit {self.most(place)} GPUs of {place.machine.name}; "
                "ep divides tp x dp, and tp x dp x pp GPUs are a replica"
            )
        sequences = tuple(sorted(self.space.get("max_num_seqs", SEQUENCES)))
        budgets = tuple(sorted(self.space.get("max_num_batched_tokens", BUDGETS)))
        size = max(1, min(4, len(found) // 8))
        return [
            PricingJob(tuple(found[at : at + size]), self.load, self.roles, sequences, budgets)
            for at in range(0, len(found), size)
        ]

    def _chosen(self, options: list[tuple[int, Option]]) -> list[tuple[int, Option]]:
        """The best option of each machine and mode, then of each family, best first."""
        order = sorted(range(len(options)), key=lambda n: (*self._rank(options[n][1]), n))
        leaders: dict[tuple[Any, ...], int] = {}
        families: dict[tuple[Any, ...], int] = {}
        for n in order:
            place, option = options[n]
            leaders.setdefault((place, option.prefill is None), n)
            families.setdefault(option.family, n)
        chosen = list(dict.fromkeys((*leaders.values(), *families.values())))[: self.top]
        return [options[n] for n in sorted(chosen, key=order.index)]

    def _rank(self, option: Option) -> tuple[float, float]:
        """The objective, then how near the plan is to its limits."""
        near = (option.ttft_s / (self.limits.ttft_s or inf), option.tpot_s / (self.limits.tpot_s or inf))
        return option.value(self.objective), max(near)

    # -- what came out ------------------------------------------------------------------------------

    def _nearest(self, by_place: list[dict[str, list[Candidate]]]) -> str:
        """Why nothing meets the limits, and the nearest limits that something meets."""
        limits = self.limits
        best: list[tuple[float, float, float, str]] = []
        for place, by_role in zip(self.places, by_place, strict=True):
            most, name = self.most(place), place.machine.accelerator.name
            found = self._alone(by_role.get("both", []), most)
            for eighths in range(1, 8):  # of the GPUs, for prompts; the rest decodes
                share = most * eighths // 8
                prompts = min(self._alone(by_role.get("prefill", []), share), default=(inf, inf, ""))
                found += [
                    (prompts[0] if tpot < inf else inf, tpot, f"prefill {prompts[2]}; decode {text}")
                    for _, tpot, text in self._alone(by_role.get("decode", []), most - share)
                ]
            best += [
                (self._excess(ttft, tpot), ttft, tpot, f"{text} of {name}") for ttft, tpot, text in found
            ]
        finite = sorted(one for one in best if one[0] < inf)
        stated = limits_text(limits)
        if not finite:
            return (
                f"no plan takes {self.load.rate_per_s:g} requests/s on {self._gpus_text()}; "
                "lower serving.load.rate_per_s, or raise --max-gpus"
            )
        _, ttft, tpot, text = finite[0]
        return (
            f"no plan keeps {stated} at {self.load.rate_per_s:g} requests/s on {self._gpus_text()}; the "
            f"nearest limits that one meets are serving.limits.ttft_s={_up(ttft):g} and "
            f"serving.limits.tpot_s={_up(tpot):g} "
            f"({text}); loosen them, or widen the space (--accelerators, --vary, --max-gpus)"
        )

    def _gpus_text(self) -> str:
        return " or ".join(f"{self.most(place):,} {place.machine.accelerator.name}" for place in self.places)

    def _alone(self, candidates: list[Candidate], most: int) -> list[tuple[float, float, str]]:
        """TTFT, TPOT and words of every candidate with so many GPUs; inf where they are no replica."""
        if not candidates:
            return []
        form = PromptPool if candidates[0].deployment.role == "prefill" else DecodingPool
        pool = form(candidates, self.load, self.limits)
        replicas = np.floor(most / pool.gpus)
        state = pool.at(replicas)
        return [
            (*((float(ttft), float(tpot)) if n >= 1 else (inf, inf)), pool_text(one.deployment.pool, int(n)))
            for ttft, tpot, n, one in zip(state.ttft_s, state.tpot_s, replicas, candidates, strict=True)
        ]

    def _excess(self, ttft: float, tpot: float) -> float:
        return max(
            ttft / (self.limits.ttft_s or inf),
            tpot / (self.limits.tpot_s or inf),
            0.0 if max(ttft, tpot) < inf else inf,
        )

    def _range(self, one: Candidate, replicas: int, kind: str) -> tuple[float, float, tuple[int, int]]:
        """Best and worst of a time as shares of the predicted one, and replicas at such step times."""
        form = PromptPool if one.deployment.role == "prefill" else DecodingPool
        times, counts = [], []
        most = self.max_gpus or one.deployment.cluster.n_gpus
        for level in (0, 1, 2):
            pool = form([one], self.load, self.limits, level)
            times.append(float(getattr(pool.at(np.array([float(replicas)])), kind)[0]))
            counts.append(int(fewest(pool, most)[0]))
        low, high = (time / times[0] if 0 < times[0] < inf else 1.0 for time in times[1:])
        return low, high, (counts[1], counts[2])

    def _row(self, option: Option, family: ServedFamily, tried: list[Tried], final: Tried) -> SizedRow:
        one, prompts = option.decode, option.prefill
        cluster = option.cluster
        counts = final.counts
        tpot_low, tpot_high, (few, many) = self._range(one, counts[0], "tpot_s")
        gpus_low, gpus_high = few * one.gpus, many * one.gpus
        ttft_of, n = (one, counts[0]) if prompts is None else (prompts, counts[1])
        ttft_low, ttft_high, (few, many) = self._range(ttft_of, n, "ttft_s")
        if prompts is not None:
            gpus_low, gpus_high = gpus_low + few * prompts.gpus, gpus_high + many * prompts.gpus
        gpus = family.size(counts)
        usd_price = cluster.price_per_gpu_hour
        usd = None if usd_price is None else gpus * usd_price.value
        tokens = self.load.rate_per_s * (self.load.inputs + self.load.outputs)
        decode = pool_text(one.deployment.pool, counts[0])
        text = (
            decode
            if prompts is None
            else f"prefill {pool_text(prompts.deployment.pool, counts[1])}; decode {decode}"
        )
        formats = [
            f"{key} {value}"
            for key in FORMATS
            if key in self.space and (value := getattr(one.deployment.serving, key))
        ]
        first = tried[0]
        return SizedRow(
            plan=", ".join([text, *formats]),
            accelerator=cluster.accelerator.name,
            cluster=cluster.name,
            mode=MODES[prompts is not None],
            gpus=gpus,
            gpus_low=min(gpus_low, gpus) or gpus,
            gpus_high=max(gpus_high, gpus),
            replicas=counts[0],
            prefill_replicas=None if prompts is None else counts[1],
            changes=family.changed(counts),
            usd_per_hour=usd,
            usd_per_million_tokens=None if usd is None else usd / 3600 / tokens * 1e6,
            ttft_s=_range_of(final.ttft_s, ttft_low, ttft_high),
            tpot_s=_range_of(final.tpot_s, tpot_low, tpot_high),
            output_tokens_per_s_per_gpu=final.output_tokens_per_s / gpus,
            tokens_per_s_per_user=1 / final.tpot_s if final.tpot_s else inf,
            share_in_limits=final.share,
            limited_by=option.limited_by,
            closed_gpus=option.gpus,
            closed_ttft_s=option.ttft_s,
            closed_tpot_s=option.tpot_s,
            first_ttft_s=first.ttft_s,
            first_tpot_s=first.tpot_s,
            simulations=len(tried),
            scenario=family.scenario.replace(**family.changed(counts)),
        )

    def _result(
        self,
        by_place: list[dict[str, list[Candidate]]],
        options: list[tuple[int, Option]],
        considered: int,
        refused: Counter[str],
        chosen: list[tuple[int, Option]],
        families: list[ServedFamily],
        tried: list[list[Tried]],
    ) -> ServingPlan:
        rows, notes = [], []
        for (_, option), family, all_tried in zip(chosen, families, tried, strict=True):
            met = [one for one in all_tried if one.met]
            if not met:
                last = all_tried[-1]
                notes.append(
                    f"left out: {option.text()}; served request by request it misses the limits up to "
                    f"{family.size(last.counts)} GPUs "
                    f"(TTFT {1e3 * last.ttft_s:,.0f} ms, TPOT {1e3 * last.tpot_s:.1f} ms)"
                )
                continue
            rows.append(
                self._row(option, family, all_tried, min(met, key=lambda one: family.size(one.counts)))
            )
        if not rows:
            raise InfeasibleError(
                f"the closed form finds plans, but none of the {len(families)} served request by request "
                f"keeps {limits_text(self.limits)}: {notes[0]}; loosen the limits, or raise --top"
            )
        paid = self.objective == "cost"
        if paid and all(row.usd_per_hour is None for row in rows):
            notes.append(
                "no accelerator has a price: the order is that of GPUs; state cluster.price_per_gpu_hour"
            )
        rows.sort(key=lambda row: (_value(row, paid), row.gpus, row.tpot_s.value, row.plan))
        right, pairs = _order(rows, paid)
        points = [point for by_role in by_place for point in frontier(by_role, self.load, self.limits)]
        kept = front(
            [p.tokens_per_s_per_user for p in points], [p.output_tokens_per_s_per_gpu for p in points]
        )
        return ServingPlan(
            scenario=self.scenario.name,
            inputs=inputs_of(self.scenario),
            objective=self.objective,
            rate_per_s=self.load.rate_per_s,
            limits=self.limits,
            considered=considered,
            feasible=len(options),
            kinds=len({id(one.table) for by_role in by_place for many in by_role.values() for one in many}),
            simulated=len(families),
            plans=tuple(rows),
            frontier=tuple(points[n] for n in kept),
            pairs=pairs,
            pairs_in_order=right,
            closed_tpot_error=_error([(row.closed_tpot_s, row.first_tpot_s) for row in rows]),
            closed_ttft_error=_error([(row.closed_ttft_s, row.first_ttft_s) for row in rows]),
            refused=dict(refused.most_common()),
            notes=tuple(notes),
        )


def _range_of(value: float, low: float, high: float) -> FigureRange:
    return FigureRange(value=value, low=value * low, high=value * high if high < inf else None)


def _value(row: SizedRow, paid: bool) -> float:
    return float(row.gpus) if not paid or row.usd_per_hour is None else row.usd_per_hour


def _order(rows: Sequence[SizedRow], paid: bool) -> tuple[int, int]:
    """Pairs that the closed form orders as the events do, and pairs that differ by the events."""
    right = pairs = 0
    for n, one in enumerate(rows):
        for other in rows[n + 1 :]:
            a, b = _value(one, paid), _value(other, paid)
            if a == b:
                continue
            pairs += 1
            right += (a / one.gpus * one.closed_gpus - b / other.gpus * other.closed_gpus) * (a - b) > 0
    return right, pairs


def _error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Median relative difference of the first from the second."""
    known = [abs(one / other - 1) for one, other in pairs if other > 0 and one < inf]
    return float(np.median(known)) if known else None


def _up(value: float) -> float:
    """A limit rounded up to two digits."""
    if not 0 < value < inf:
        return value
    digits = 1 - floor(log10(value))
    scale = 10.0**digits
    return ceil(value * scale) / scale
