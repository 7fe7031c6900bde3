"""Sizing: the fewest GPUs, or the lowest price, that serve a load within the limits of its users.

Every kind of replica is priced by the step model and judged in closed form; the best few are then served request by
request, with more or fewer replicas until the limits are just met. What is printed comes from the events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, floor, inf, log10
from typing import Any

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.validation import nearest
from moesim.hwmodels.yaml_io import shipped_names
from moesim.simulator.common.texts import parse_values
from moesim.simulator.planner.processes import engine_processes, outcomes
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.scenario.defaults import has_node
from moesim.simulator.scenario.inputs import inputs_of
from moesim.simulator.scenario.serving import Serving, ServingLimits, ServingPool
from moesim.simulator.serving.closed_form import (
    WHY,
    Candidate,
    DecodingPool,
    LoadMoments,
    PromptPool,
    candidate,
    fewest,
    moments,
    step_tables,
)
from moesim.simulator.serving.deployment import Deployment
from moesim.simulator.serving.requests import NS_PER_S, load_requests
from moesim.simulator.serving.simulate import prepare
from moesim.simulator.serving.sized import (
    FrontierPoint,
    Range,
    ServingPlan,
    SizedRow,
    front,
    limits_text,
    pool_text,
)

OBJECTIVES = ("cost", "gpus")
MODES = ("aggregated", "disaggregated")
MOST_GPUS = 1024
"""GPUs of each accelerator where neither `max_gpus` nor the scenario's own cluster says how many there are."""
MOST_A_REPLICA = 64
"""Most GPUs of a replica that the default space tries."""
RESIDENCES, MOST_REQUESTS, LEAST_REQUESTS = 5, 20_000, 500
"""The simulated load lasts so many times as long as a request stays, within these numbers of requests."""
MOST_TRIES = 8
"""Most simulations of one family of plans, each with other numbers of replicas."""

Tell = Callable[[str], None]


# -- the space ---------------------------------------------------------------------------------------

FORMATS = ("weights", "experts", "cache")
KEYS = (*(key for key in ServingPool.model_fields if key != "replicas"), *FORMATS)
"""Keys of `serving` that a search may vary."""
SEQUENCES = (8, 16, 32, 64, 128, 256, 512)
BUDGETS = (2048, 8192)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(max(most, 1).bit_length()))


def space_of(vary: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Values by key of `serving`, from texts such as `1..8:x2` or lists; raises InputError for an unknown key."""
    space = {}
    for name, values in vary.items():
        key = name.removeprefix("serving.")
        if key not in KEYS:
            raise InputError(
                f"serve plan cannot vary {name!r}{nearest(key, list(KEYS))}; it varies {', '.join(KEYS)}"
            )
        listed = parse_values(values, name) if isinstance(values, str) else tuple(values)
        if not listed:
            raise InputError(f"serve plan: {name} has no values; give one or more")
        space[key] = listed
    return space


def _degrees(
    machine: Deployment, space: Mapping[str, tuple[Any, ...]], most: int
) -> Iterator[dict[str, int]]:
    """Ways to spread the model over the GPUs of a replica: stated degrees, else powers of two within rules.

    By rule TP stays in a node and divides the query heads; DP without EP is only for experts that TP splits, so
    only in a node; dense models have neither DP nor EP, as that is the same as more replicas.
    """
    shape, node = machine.shape, machine.cluster.node.n_gpus
    moe = shape.moe
    heads = min(getattr(attention, "heads", 1) for attention in shape.attention_by_name.values())
    tps = space.get("tp", tuple(n for n in _powers(min(node, 8, most)) if heads % n == 0))
    for tp, pp in product(tps, space.get("pp", (1,))):
        dps = space.get("dp", _powers(min(MOST_A_REPLICA, most) // (tp * pp)) if moe else (1,))
        for dp in dps:
            group = tp * dp
            wide = tuple(dict.fromkeys((1, group))) if moe else (1,)
            for ep in space.get("ep", wide):
                fits = group % ep == 0 and group * pp <= most
                if fits and moe and "ep" not in space:
                    fits = (moe.experts + machine.pool.redundant_experts) % ep == 0
                    fits = fits and (ep > 1 or group <= node)
                if fits:
                    yield {"tp": tp, "dp": dp, "pp": pp, "ep": ep}


_BY_LIMIT = ("max_num_seqs", "max_num_batched_tokens")


def kinds(machine: Deployment, space: Mapping[str, tuple[Any, ...]], most: int) -> list[Deployment]:
    """Deployments of every kind of replica: degrees, formats and the keys that are varied, but not the limits."""
    others = {key: values for key, values in space.items() if key not in (*_BY_LIMIT, "tp", "dp", "pp", "ep")}
    found = []
    for degrees in _degrees(machine, space, most):
        for values in product(*others.values()):
            data = dict(zip(others, values, strict=True)) | degrees
            serving = _checked(machine.serving, data)
            pool = ServingPool(**{key: getattr(serving, key) for key in ServingPool.model_fields})
            found.append(replace(machine, serving=serving, pool=pool))
    return found


def _checked(serving: Serving, changes: Mapping[str, Any]) -> Serving:
    try:
        return Serving.model_validate({**serving.model_dump(exclude_unset=True), **changes, "prefill": None})
    except ValueError as problem:
        first = str(problem).splitlines()[2].strip() if len(str(problem).splitlines()) > 2 else str(problem)
        raise InputError(
            f"serve plan: {', '.join(f'{k}={v}' for k, v in changes.items())}: {first}"
        ) from None


# -- candidates of one kind --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """Kinds of one machine to price: a chunk of work of one process."""

    kinds: tuple[Deployment, ...]
    load: LoadMoments
    roles: tuple[str, ...]
    sequences: tuple[int, ...]
    budgets: tuple[int, ...]


@dataclass
class _Priced:
    """Candidates of a job, by role, and why others are none."""

    by_role: dict[str, list[Candidate]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


def _price(job: _Job) -> _Priced:
    """Candidates with their step tables, for every kind, role and limit of the scheduler."""
    out = _Priced()
    for kind, role in product(job.kinds, job.roles):
        budgets = job.budgets[:1] if role == "decode" else job.budgets
        sequences = job.sequences[-1:] if role == "prefill" else job.sequences
        options = []
        for budget, most in product(budgets, sequences):
            limits = {"max_num_batched_tokens": max(budget, most), "max_num_seqs": most}
            one = replace(kind, role=role, pool=kind.pool.model_copy(update=limits))
            try:
                one.check_context(job.load.longest)
                options.append(one)
            except (InfeasibleError, InputError) as problem:
                out.refused[_reason(problem)] += 1
        try:
            tables = step_tables(options, job.load)
        except (InfeasibleError, InputError) as problem:
            out.refused[_reason(problem)] += len(options)
            continue
        found = [candidate(one, table, job.load) for one, table in zip(options, tables, strict=True)]
        out.by_role.setdefault(role, []).extend(found)
    return out


def _reason(problem: Exception) -> str:
    """What a refusal says, without the figures of the one candidate."""
    text = str(problem)
    if "leave no cache" in text:
        return "the weights leave no room for a cache"
    if "does not fit the cache" in text:
        return "the longest request does not fit the cache of a rank"
    return text


# -- options: candidates with replicas ---------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A plan by the closed form: a candidate and, for disaggregation, that for prompts, with replicas of each."""

    decode: Candidate
    replicas: int
    prefill: Candidate | None
    prefill_replicas: int
    ttft_s: float
    tpot_s: float
    limited_by: str

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        more = self.prefill.gpus * self.prefill_replicas if self.prefill else 0
        return self.decode.gpus * self.replicas + more

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""
        return self.decode.deployment.cluster

    @property
    def family(self) -> tuple[Any, ...]:
        """What the few plans that are served differ in: machine, formats, mode and kind of the decoding replica."""
        one = self.decode.deployment
        pool = one.pool.model_dump(exclude=set(_BY_LIMIT))
        return (
            one.cluster.name,
            *(getattr(one.serving, key) for key in FORMATS),
            self.prefill is None,
            *pool.values(),
        )

    def usd_per_hour(self) -> float | None:
        """Price of all GPUs; None where the cluster has none."""
        price = self.cluster.price_per_gpu_hour
        return None if price is None else self.gpus * price.value

    def value(self, objective: str) -> float:
        """What is to be low."""
        if objective == "gpus":
            return float(self.gpus)
        usd = self.usd_per_hour()
        return inf if usd is None else usd

    def text(self) -> str:
        """The pools in words."""
        text = pool_text(self.decode.deployment.pool, self.replicas)
        if self.prefill is None:
            return text
        return f"prefill {pool_text(self.prefill.deployment.pool, self.prefill_replicas)}; decode {text}"


@dataclass(frozen=True)
class _Judged:
    """Candidates of one role with the fewest replicas that meet the limits (0: none do), and one less."""

    candidates: list[Candidate]
    replicas: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    limited_by: list[str]

    @property
    def met(self) -> list[int]:
        """Places of those that meet the limits."""
        return np.flatnonzero(self.replicas > 0).tolist()


def _judge(candidates: list[Candidate], load: LoadMoments, limits: ServingLimits, most: int) -> _Judged:
    form = PromptPool if candidates and candidates[0].deployment.role == "prefill" else DecodingPool
    if not candidates:
        return _Judged([], np.zeros(0), np.zeros(0), np.zeros(0), [])
    pool = form(candidates, load, limits)
    replicas = fewest(pool, most)
    at = pool.at(np.where(replicas > 0, replicas, np.floor(most / pool.gpus)))
    less = pool.at(np.maximum(replicas - 1, 1)).why
    by = [WHY[int(why)] if n > 1 else "one replica is enough" for n, why in zip(replicas, less, strict=True)]
    return _Judged(candidates, replicas, at.ttft_s, at.tpot_s, by)


def _options(
    by_role: Mapping[str, list[Candidate]], load: LoadMoments, limits: ServingLimits, most: int
) -> list[Option]:
    """All plans of one machine that meet the limits by the closed form."""
    both = _judge(by_role.get("both", []), load, limits, most)
    found = [
        Option(
            both.candidates[n],
            int(both.replicas[n]),
            None,
            0,
            float(both.ttft_s[n]),
            float(both.tpot_s[n]),
            both.limited_by[n],
        )
        for n in both.met
    ]
    # An answer's first token comes from the prompts' pool: each pool has its own limit.
    decode, prompts = (_judge(by_role.get(role, []), load, limits, most) for role in ("decode", "prefill"))
    for n, m in product(decode.met, prompts.met):
        d, p = decode.candidates[n], prompts.candidates[m]
        if _same_formats(d, p):
            by = f"decode {decode.limited_by[n]}, prefill {prompts.limited_by[m]}"
            one = Option(
                d,
                int(decode.replicas[n]),
                p,
                int(prompts.replicas[m]),
                float(prompts.ttft_s[m]),
                float(decode.tpot_s[n]),
                by,
            )
            if one.gpus <= most:
                found.append(one)
    return found


def _same_formats(one: Candidate, other: Candidate) -> bool:
    return all(
        getattr(one.deployment.serving, key) == getattr(other.deployment.serving, key) for key in FORMATS
    )


# -- served request by request -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """A plan to serve with more or fewer replicas: `counts` of the decoding pool and, behind it, that for prompts."""

    scenario: Scenario
    changes: dict[str, Any]
    prompts: dict[str, Any] | None
    counts: tuple[int, ...]
    gpus: tuple[int, ...]
    most: int

    def changed(self, counts: tuple[int, ...]) -> dict[str, Any]:
        """Keys of the scenario with these numbers of replicas."""
        prefill = None if self.prompts is None else {**self.prompts, "replicas": counts[1]}
        return {**self.changes, "serving.replicas": counts[0], "serving.prefill": prefill}

    def size(self, counts: tuple[int, ...]) -> int:
        """GPUs of all replicas."""
        return sum(n * gpus for n, gpus in zip(counts, self.gpus, strict=True))


@dataclass(frozen=True)
class _Tried:
    """What the events said of a family with these numbers of replicas; times at the percentile."""

    counts: tuple[int, ...]
    met: bool
    slow_tokens: bool
    share: float | None
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float


def _family(
    scenario: Scenario, option: Option, varied: Sequence[str], load: LoadMoments, most: int
) -> _Family:
    serving = option.decode.deployment.serving
    pool = option.decode.deployment.pool
    pool_keys = tuple(
        dict.fromkeys(("tp", "dp", "pp", "ep", *_BY_LIMIT, *(k for k in varied if k not in FORMATS)))
    )
    changes = {f"serving.{key}": getattr(pool, key) for key in pool_keys}
    changes |= {f"serving.{key}": getattr(serving, key) for key in FORMATS if key in varied}
    stated = scenario.serving.load if scenario.serving else None
    if stated is not None and stated.log is None:
        stay = load.outputs * option.tpot_s + option.ttft_s
        wanted = ceil(RESIDENCES * stay * load.rate_per_s / 500) * 500
        changes["serving.load.requests"] = max(
            stated.requests or 0, min(max(wanted, LEAST_REQUESTS), MOST_REQUESTS)
        )
    prompts = None
    if option.prefill is not None:
        other = option.prefill.deployment.pool
        prompts = {key: getattr(other, key) for key in pool_keys}
        prompts["memory_fraction"] = other.memory_fraction
    counts = (option.replicas, *((option.prefill_replicas,) if option.prefill else ()))
    gpus = (option.decode.gpus, *((option.prefill.gpus,) if option.prefill else ()))
    return _Family(scenario, changes, prompts, counts, gpus, most)


def _served(family: _Family, counts: tuple[int, ...]) -> _Tried:
    """Serve the load with these numbers of replicas."""
    service = prepare(family.scenario.replace(**family.changed(counts)))
    served, limits = service.run(), service.serving.limits
    outputs = served.requests.output_tokens
    ttft = (served.first_token_ns - served.arrival_ns) / NS_PER_S
    later = outputs > 1
    tpot = np.zeros(len(ttft))
    tpot[later] = (served.last_token_ns - served.first_token_ns)[later] / NS_PER_S / (outputs[later] - 1)
    whole = (served.last_token_ns - served.arrival_ns) / NS_PER_S
    kept = np.ones(len(ttft), dtype=bool)
    for values, limit in ((ttft, limits.ttft_s), (tpot, limits.tpot_s), (whole, limits.end_to_end_s)):
        kept &= values <= (inf if limit is None else limit)
    stated = any((limits.ttft_s, limits.tpot_s, limits.end_to_end_s))
    slow = float(np.percentile(tpot, limits.percentile))
    return _Tried(
        counts,
        bool(kept.mean() >= limits.percentile / 100),
        limits.tpot_s is not None and slow > limits.tpot_s,
        float(kept.mean()) if stated else None,
        float(np.percentile(ttft, limits.percentile)),
        slow,
        float(outputs.sum()) / (float(served.last_token_ns.max()) / NS_PER_S),
    )


def settle(family: _Family) -> list[_Tried]:
    """Serve a family with more replicas until the limits are met, then with fewer while they are; all that was tried."""
    tried: list[_Tried] = [_served(family, family.counts)]

    def other(counts: tuple[int, ...]) -> _Tried | None:
        known = any(one.counts == counts for one in tried)
        if known or len(tried) >= MOST_TRIES or family.size(counts) > family.most or min(counts) < 1:
            return None
        tried.append(_served(family, counts))
        return tried[-1]

    now = tried[0]
    while not now.met:
        pool = 0 if len(now.counts) == 1 or now.slow_tokens else 1
        step = max(1, now.counts[pool] * len(tried) // 10)
        more = other(_with(now.counts, pool, step))
        if more is None:
            return tried
        now = more
    for pool in range(len(now.counts)):
        step = max(1, now.counts[pool] // 10)
        while (less := other(_with(now.counts, pool, -step))) is not None:
            if less.met:
                now = less
            elif step == 1:
                break
            else:
                step = max(1, step // 2)
    return tried


def _with(counts: tuple[int, ...], pool: int, more: int) -> tuple[int, ...]:
    return tuple(n + more if place == pool else n for place, n in enumerate(counts))


# -- the frontier ------------------------------------------------------------------------------------


def _prompts_rate(
    prompts: list[Candidate], load: LoadMoments, limits: ServingLimits
) -> tuple[float, Candidate | None, float]:
    """Most requests a second and GPU of prompts within the TTFT, the candidate, and its TTFT."""
    best: tuple[float, Candidate | None, float] = (0.0, None, 0.0)
    if not prompts:
        return best
    form = PromptPool(prompts, load, limits)
    for share in np.linspace(0.05, 0.95, 19):
        want = share * form.most_rate
        ttft = form.state(want, form.ranks).ttft_s
        rate = np.where(ttft <= (limits.ttft_s or inf), want * form.ranks / form.gpus, 0.0)
        place = int(rate.argmax())
        if rate[place] > best[0]:
            best = (float(rate[place]), prompts[place], float(ttft[place]))
    return best


def _frontier(
    by_role: Mapping[str, list[Candidate]], load: LoadMoments, limits: ServingLimits
) -> list[FrontierPoint]:
    """Points of one machine that no other beats: every candidate at several loads, pools in the ratio of the load."""
    found: list[tuple[float, float, float, Candidate, Candidate | None]] = []
    prompt_rate, prompt, prompt_ttft = _prompts_rate(by_role.get("prefill", []), load, limits)
    for role in ("both", "decode"):
        candidates = by_role.get(role, [])
        if not candidates or (role == "decode" and prompt is None):
            continue
        form = DecodingPool(candidates, load, limits)
        for column in range(0, form.rate.shape[1], 2):
            want = form.rate[:, column] * (1 - 1e-6)
            state = form.state(want, form.ranks)
            rate = want * form.ranks / form.gpus
            ttft = state.ttft_s
            if role == "decode":
                rate, ttft = 1 / (1 / rate + 1 / prompt_rate), np.full_like(ttft, prompt_ttft)
            for n in np.flatnonzero((ttft <= (limits.ttft_s or inf)) & np.isfinite(state.tpot_s)):
                other = prompt if role == "decode" else None
                found.append(
                    (
                        1 / float(state.tpot_s[n]),
                        float(rate[n]) * load.outputs,
                        float(ttft[n]),
                        candidates[n],
                        other,
                    )
                )
    return [_point(*found[n]) for n in front([one[0] for one in found], [one[1] for one in found])]


def _point(
    speed: float, tokens: float, ttft: float, one: Candidate, prompts: Candidate | None
) -> FrontierPoint:
    cluster = one.deployment.cluster
    price = cluster.price_per_gpu_hour
    text = pool_text(one.deployment.pool, 1)
    return FrontierPoint(
        plan=text if prompts is None else f"prefill {pool_text(prompts.deployment.pool, 1)}; decode {text}",
        accelerator=cluster.accelerator.name,
        mode=MODES[prompts is not None],
        gpus=one.gpus + (prompts.gpus if prompts else 0),
        tokens_per_s_per_user=speed,
        output_tokens_per_s_per_gpu=tokens,
        usd_per_million_output_tokens=None if price is None else price.value / 3600 / tokens * 1e6,
        ttft_s=ttft,
    )


# -- the search --------------------------------------------------------------------------------------


def machines(scenario: Scenario, accelerators: Sequence[str], most: int | None) -> list[Scenario]:
    """The scenario on each accelerator with its usual node, network and price; on its own cluster without any.

    An accelerator may be named in short (`h100` for `h100-sxm`). Raises InputError for an unknown one.
    """
    if not accelerators:
        return [scenario]
    known = [name for name in shipped_names("accelerators") if has_node(name)]
    found = []
    for text in accelerators:
        names = [name for name in known if name == text] or [
            name for name in known if name in (f"{text}-sxm", f"{text}-oam")
        ]
        names = names or [name for name in known if name.startswith(f"{text}-")]
        if len(names) != 1:
            several = f"; it may be {', '.join(names)}" if names else nearest(text, known)
            raise InputError(
                f"accelerator {text!r} is not known{several}; known: {', '.join(known)}",
                key="accelerators",
                nearest=names,
            )
        own = scenario.machine
        if own.accelerator.name == names[0]:
            found.append(scenario)
            continue
        node_gpus = _node_gpus(scenario, names[0])
        nodes = max(ceil((most or MOST_GPUS) / node_gpus), 1)
        found.append(scenario.replace(cluster={"accelerator": names[0], "nodes": nodes}))
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
    progress: Tell = lambda text: None,
) -> ServingPlan:
    """The cheapest plans, or those of fewest GPUs, that serve a scenario's load within its limits.

    `scenario` and overrides: as for `moesim.load`; its section `serving` has the load (a rate or a log), the limits,
    and every key that is not varied. `objective`: cost or gpus. `accelerators`: names, each with its usual node and
    price; absent, the scenario's cluster. `vary`: values by key of `serving` (`1..8:x2`, a list); degrees and limits
    of the scheduler are varied by rule. `modes`: one pool for all work, or pools for prompts and decodes.
    `max_gpus`: of each accelerator. `top`: plans that are served and listed. Raises InputError for what cannot be
    searched, InfeasibleError, with the nearest limits that something meets, where no plan does.
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
    return search.run(workers, progress)


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
            "serve plan sizes for a rate, and serving.load is a closed loop (arrivals: concurrency), whose rate is "
            "what the replicas give; state serving.load.rate_per_s with arrivals: poisson, or a log"
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

    def run(self, workers: int, progress: Tell) -> ServingPlan:
        """Price, judge and serve."""
        with engine_processes(workers) as pool:
            jobs = [(n, job) for n in range(len(self.places)) for job in self._jobs(n)]
            progress(f"pricing {sum(len(job.kinds) for _, job in jobs)} kinds of replica")
            priced: list[_Priced | None] = [None] * len(jobs)
            for at, one in outcomes(pool, _price, [job for _, job in jobs]):
                priced[at] = one
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
                for option in _options(by_role, self.load, self.limits, self.most(self.places[n]))
            ]
            considered = sum(
                len(by.get("both", [])) + len(by.get("decode", [])) * len(by.get("prefill", []))
                for by in by_place
            )
            if not considered:
                raise InfeasibleError(
                    f"no replica can be: {'; '.join(f'{n:,} times: {why}' for why, n in refused.most_common(5))}"
                )
            if not options:
                raise InfeasibleError(self._nearest(by_place))
            chosen = self._chosen(options)
            families = [
                _family(self.places[n], option, tuple(self.space), self.load, self.most(self.places[n]))
                for n, option in chosen
            ]
            tried: list[list[_Tried]] = [[] for _ in families]
            for done, (at, served) in enumerate(outcomes(pool, settle, families)):
                tried[at] = served
                progress(f"served {done + 1} of {len(families)} plans request by request")
        return self._result(by_place, options, considered, refused, chosen, families, tried)

    def _jobs(self, n: int) -> list[_Job]:
        place = self.places[n]
        assert place.serving is not None, "checked"
        serving = place.serving.model_copy(update={"prefill": None})
        machine = Deployment(place.shape, place.machine, place.calibration, serving, serving)
        found = kinds(machine, self.space, self.most(place))
        if not found:
            raise InputError(
                f"serve plan: no degrees of the space fit {self.most(place)} GPUs of {place.machine.name}"
            )
        sequences = tuple(sorted(self.space.get("max_num_seqs", SEQUENCES)))
        budgets = tuple(sorted(self.space.get("max_num_batched_tokens", BUDGETS)))
        size = max(1, min(4, len(found) // 8))
        return [
            _Job(tuple(found[at : at + size]), self.load, self.roles, sequences, budgets)
            for at in range(0, len(found), size)
        ]

    def _chosen(self, options: list[tuple[int, Option]]) -> list[tuple[int, Option]]:
        """The best option of each family, best first."""
        order = sorted(range(len(options)), key=lambda n: (*self._rank(options[n][1]), n))
        kept: dict[tuple[Any, ...], int] = {}
        for n in order:
            kept.setdefault(options[n][1].family, n)
        return [options[n] for n in list(kept.values())[: self.top]]

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
            pools = {
                role: self._alone(candidates, most) for role, candidates in by_role.items() if candidates
            }
            found = [(ttft, tpot, text) for ttft, tpot, text in pools.get("both", [])]
            prompts = min(pools.get("prefill", [(inf, 0.0, "")]), key=lambda one: one[0])
            found += [
                (prompts[0], tpot, f"prefill {prompts[2]}; decode {text}")
                for _, tpot, text in pools.get("decode", [])
            ]
            best += [
                (self._excess(ttft, tpot), ttft, tpot, f"{text} of {name}") for ttft, tpot, text in found
            ]
        finite = sorted(one for one in best if one[0] < inf)
        stated = limits_text(limits)
        if not finite:
            return (
                f"no plan takes {self.load.rate_per_s:g} requests/s on {self._gpus_text()}, whatever the limits; "
                "lower serving.load.rate_per_s, or raise --max-gpus"
            )
        _, ttft, tpot, text = finite[0]
        return (
            f"no plan keeps {stated} at {self.load.rate_per_s:g} requests/s on {self._gpus_text()}; the nearest limits "
            f"that one meets are serving.limits.ttft_s={_up(ttft):g} and serving.limits.tpot_s={_up(tpot):g} "
            f"({text}); loosen them, or widen the space (--accelerators, --vary, --max-gpus)"
        )

    def _gpus_text(self) -> str:
        return " or ".join(f"{self.most(place):,} {place.machine.accelerator.name}" for place in self.places)

    def _alone(self, candidates: list[Candidate], most: int) -> list[tuple[float, float, str]]:
        """TTFT, TPOT and words of every candidate with all GPUs."""
        form = PromptPool if candidates[0].deployment.role == "prefill" else DecodingPool
        pool = form(candidates, self.load, self.limits)
        replicas = np.floor(most / pool.gpus)
        state = pool.at(replicas)
        return [
            (float(ttft) if n >= 1 else inf, float(tpot), pool_text(one.deployment.pool, int(n)))
            for ttft, tpot, n, one in zip(state.ttft_s, state.tpot_s, replicas, candidates, strict=True)
        ]

    def _excess(self, ttft: float, tpot: float) -> float:
        return max(
            ttft / (self.limits.ttft_s or inf),
            tpot / (self.limits.tpot_s or inf),
            0.0 if max(ttft, tpot) < inf else inf,
        )

    def _range(self, one: Candidate, replicas: int, kind: str) -> tuple[float, float, tuple[int, int]]:
        """Best and worst of a time as shares of the predicted one, and replicas at best and worst step times."""
        form = PromptPool if one.deployment.role == "prefill" else DecodingPool
        times, counts = [], []
        most = self.max_gpus or one.deployment.cluster.n_gpus
        for level in (0, 1, 2):
            pool = form([one], self.load, self.limits, level)
            times.append(float(getattr(pool.at(np.array([float(replicas)])), kind)[0]))
            counts.append(int(fewest(pool, most)[0]))
        low, high = (time / times[0] if 0 < times[0] < inf else 1.0 for time in times[1:])
        return low, high, (counts[1], counts[2])

    def _row(self, option: Option, family: _Family, tried: list[_Tried], final: _Tried) -> SizedRow:
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
        price = cluster.price_per_gpu_hour
        usd = None if price is None else gpus * price.value
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
            ttft_s=Range(value=final.ttft_s, low=final.ttft_s * ttft_low, high=final.ttft_s * ttft_high),
            tpot_s=Range(value=final.tpot_s, low=final.tpot_s * tpot_low, high=final.tpot_s * tpot_high),
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
        families: list[_Family],
        tried: list[list[_Tried]],
    ) -> ServingPlan:
        rows, notes = [], []
        for (_, option), family, all_tried in zip(chosen, families, tried, strict=True):
            met = [one for one in all_tried if one.met]
            if not met:
                last = all_tried[-1]
                notes.append(
                    f"left out: {option.text()}; served request by request it misses the limits up to "
                    f"{family.size(last.counts)} GPUs (TTFT {1e3 * last.ttft_s:,.0f} ms, TPOT {1e3 * last.tpot_s:.1f} ms)"
                )
                continue
            rows.append(
                self._row(option, family, all_tried, min(met, key=lambda one: family.size(one.counts)))
            )
        if not rows:
            raise InfeasibleError(
                f"the closed form finds plans, but none of the {len(families)} that were served request by request "
                f"keeps {limits_text(self.limits)}: {notes[0]}; loosen the limits, or raise --top"
            )
        paid = self.objective == "cost"
        if paid and all(row.usd_per_hour is None for row in rows):
            notes.append(
                "no accelerator has a price: the order is that of GPUs; state cluster.price_per_gpu_hour"
            )
        rows.sort(key=lambda row: (_value(row, paid), row.gpus, row.tpot_s.value, row.plan))
        right, pairs = _order(rows, paid)
        points = [point for by_role in by_place for point in _frontier(by_role, self.load, self.limits)]
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
    return ceil(value * 10**digits) / 10**digits
