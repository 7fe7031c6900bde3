"""Kinds of replica that could serve a load, plans of them in closed form, and the frontier (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import inf
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.texts import parse_values
from moesim.simulator.scenario.serving import Serving, ServingLimits, ServingPool
from moesim.simulator.serving.closed_form import (
    WHY,
    Candidate,
    DecodingPool,
    LoadMoments,
    PromptPool,
    candidate,
    fewest,
    step_tables,
)
from moesim.simulator.serving.deployment import Deployment

MODES = ("aggregated", "disaggregated")
"""One pool that does all work, or pools for prompts and for decodes."""
MOST_A_REPLICA = 64
"""Most GPUs of a replica that the default space tries."""

# -- the space ---------------------------------------------------------------------------------------

FORMATS = ("weights", "experts", "cache")
KEYS = (*(key for key in ServingPool.model_fields if key != "replicas"), *FORMATS)
"""Keys of `serving` that a search may vary."""
COUNTS = ("tp", "dp", "pp", "ep", "max_num_seqs", "max_num_batched_tokens")
"""Those that are whole numbers above zero."""
SEQUENCES = (8, 16, 32, 64, 128, 256, 512)
BUDGETS = (2048, 8192)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(max(most, 1).bit_length()))


def space_of(vary: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Values by key of `serving`, from texts (`1..8:x2`) or lists; raises InputError for an unknown key."""
    space = {}
    for name, values in vary.items():
        key = name.removeprefix("serving.")
        if key not in KEYS:
            raise InputError(
                f"serve plan cannot vary {name!r}{nearest(key, list(KEYS))}; it varies {', '.join(KEYS)}"
            )
        listed = parse_values(values, name) if isinstance(values, str) else tuple(values)
        if key in COUNTS and (bad := [n for n in listed if type(n) is not int or n < 1]):
            raise InputError(
                f"serve plan: {name}={bad[0]!r} is no whole number above 0; give such as {name}=1,2,4"
            )
        if not listed:
            raise InputError(f"serve plan: {name} has no values; give one or more")
        space[key] = listed
    return space


def _degrees(
    machine: Deployment, space: Mapping[str, tuple[Any, ...]], most: int
) -> Iterator[dict[str, int]]:
    """Ways to spread the model over the GPUs of a replica: stated degrees, else powers of two within rules.

    By rule TP stays in a node and divides the query heads; DP without EP is only for experts that TP splits,
    so only in a node; dense models have neither DP nor EP, as that is the same as more replicas.
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


BY_LIMIT = ("max_num_seqs", "max_num_batched_tokens")


def kinds(machine: Deployment, space: Mapping[str, tuple[Any, ...]], most: int) -> list[Deployment]:
    """Deployments of every kind of replica: degrees and varied keys, without the limits."""
    others = {key: values for key, values in space.items() if key not in (*BY_LIMIT, "tp", "dp", "pp", "ep")}
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


class PricingJob(Struct, frozen=True):
    """Kinds of one machine to price: a chunk of work of one process."""

    kinds: tuple[Deployment, ...]
    load: LoadMoments
    roles: tuple[str, ...]
    sequences: tuple[int, ...]
    budgets: tuple[int, ...]


class PricedKinds(Struct):
    """Candidates of a job, by role, and why others are none."""

    by_role: dict[str, list[Candidate]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


def price(job: PricingJob) -> PricedKinds:
    """Candidates with their step tables, for every kind, role and limit of the scheduler."""
    out = PricedKinds()
    for kind, role in product(job.kinds, job.roles):
        budgets = job.budgets[:1] if role == "decode" else job.budgets
        sequences = job.sequences[-1:] if role == "prefill" else job.sequences
        options = []
        for budget, most in product(budgets, sequences):
            limits = {"max_num_batched_tokens": max(budget, most), "max_num_seqs": most}
            if role == "prefill":
                limits["draft_tokens"] = 0
            one = replace(kind, role=role, pool=kind.pool.model_copy(update=limits))
            try:
                if one.cache_room_bytes <= 0:
                    out.refused["the weights leave no room for a cache"] += 1
                    continue
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
    if "does not fit the cache" in text:
        return "the longest request does not fit the cache of a rank"
    return text


# -- options: candidates with replicas ---------------------------------------------------------------


class Option(Struct, frozen=True):
    """A plan by the closed form: a candidate, for disaggregation that for prompts, and their replicas."""

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
        """What served plans differ in: machine, formats, mode and kind of the decoding replica."""
        one = self.decode.deployment
        pool = one.pool.model_dump(exclude=set(BY_LIMIT))
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


class _Judged(Struct, frozen=True):
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


def options_of(
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


def frontier(
    by_role: Mapping[str, list[Candidate]], load: LoadMoments, limits: ServingLimits
) -> list[FrontierPoint]:
    """Points of one machine that no other beats; pools in the ratio of the load."""
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


# -- the frontier ------------------------------------------------------------------------------------


FINEST = 0.85
"""Printed points of a frontier are at least so far apart in the speed of a user."""


def pool_text(pool: ServingPool, replicas: int) -> str:
    """A pool in words, such as `4 x TP1 DP8 EP8, 128 sequences`."""
    degrees = [
        f"{name}{n}"
        for name, n in (("TP", pool.tp), ("DP", pool.dp), ("PP", pool.pp), ("EP", pool.ep))
        if n > 1
    ]
    more = [f"+{pool.draft_tokens} drafts"] if pool.draft_tokens else []
    more += ["two-batch overlap"] if pool.two_batch_overlap else []
    return ", ".join([f"{replicas} x {' '.join(degrees) or '1 GPU'}", f"{pool.max_num_seqs} seqs", *more])


class FrontierPoint(Frozen):
    """Most tokens a GPU for the speed that a user sees, in closed form."""

    plan: str
    accelerator: str
    mode: str
    gpus: int
    tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float
    usd_per_million_output_tokens: float | None
    ttft_s: float


def front(speed: Sequence[float], throughput: Sequence[float]) -> list[int]:
    """Places of the points that no other beats in both, fastest first, not closer than FINEST."""
    order = sorted(range(len(speed)), key=lambda n: (-speed[n], -throughput[n], n))
    kept: list[int] = []
    for place in order:
        if not kept or throughput[place] > throughput[kept[-1]]:
            kept.append(place)
    spaced = kept[:1]
    for place in kept[1:]:
        if speed[place] <= FINEST * speed[spaced[-1]]:
            spaced.append(place)
    return spaced
