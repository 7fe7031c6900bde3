"""Links, uploads and lists of values: what a visitor of the dashboard sends."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fuzz_base import check, described, home, pool, texts_of
from fuzz_files import count_texts, load_texts, topology_texts
from fuzz_mutator import Mutator

import moesim
from moesim.app import scenario_links, uploads
from moesim.app import jobs
from moesim.simulator.common.texts import parse_values
from moesim.simulator.scenario import Scenario

_KEYS = (
    "seed", "schedule", "precision", "profile", "model", "cluster", "cluster.nodes", "parallel.tp",
    "parallel.pp",
    "parallel.ep", "parallel.cp", "parallel.vpp", "parallel.microbatch", "parallel.zero_stage", "parallel",
    "batch",
    "batch.sequences", "batch.sequence_length", "communication.sms", "communication.overlap",
    "communication.kernels",
    "recompute", "routing", "routing.expert_load_cv", "routing.expert_load_cv.value", "routing.load",
    "routing.load.file",
    "routing.capacity", "routing.eplb", "routing.groups_per_token", "variation.clock_cv",
    "variation.jitter_cv",
    "variation.clock_cv.between", "run", "run.tokens", "run.replicas", "run.failures", "run.checkpoint",
    "run.start",
    "resolution", "spreading", "faults", "software", "software.attention", "stages", "stages.layers",
    "stages.blocks",
    "fleet", "fleet.pools", "cluster.node", "cluster.node.gpus", "cluster.node.accelerator",
    "cluster.network",
    "cluster.node.nics_per_gpu", "cluster.node.nic_bandwidth", "cluster.node.accelerator.memory_bandwidth",
    "cluster.price_per_gpu_hour", "cluster.network.fabric.link_bandwidth", "cluster.node.scale_up", "name",
    "description",
    "precision.gemm", "communication", "variation", "model.hidden", "", ".", "a.b.c", "seed.x", "x" * 5000,
    "sed",
)  # fmt: skip


@lru_cache(maxsize=1)
def _whole() -> dict[str, Any]:
    return home().to_dict() | {"cluster": home().machine.model_dump(mode="json", exclude_none=True)}


def _held(key: str, otherwise: Any) -> Any:
    """What the home case holds under a key."""
    value: Any = _whole()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return (
        otherwise
        if value is None
        else value["value"]
        if isinstance(value, dict) and "value" in value
        else value
    )


def override(m: Mutator) -> str:
    r = m.rng
    key = r.choice(_KEYS) if r.random() < 0.93 else m.key(r.choice(_KEYS))
    if r.random() < 0.15:
        return f"{key}={m.hostile()[:4000]}"
    old = _held(key, r.choice((8, 64, 0.1, "50 GB/s", "1f1b", "bf16", [1, 2], r.choice(pool()))))
    value = old if r.random() < 0.25 else m.value(old)
    text = m.text_of(value) if r.random() < 0.7 else str(value)
    return r.choice((f"{key}={text}",) * 20 + (f"{key}", f"={text}", text, f"{key}=={text}"))


_PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "model": ("deepseek-v3", "mixtral-8x22b", "qwen3-30b-a3b", "llama-3.1-70b"),
    "cluster": ("h100-1024", "h200-1024", "h200-8", "mi300x-2048", "gb200-nvl72-2048", "deepseek-h800-2048"),
    "cluster.nodes": (1, 2, 4, 16, 100, 256), "schedule": ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1",
    "zbv", "dualpipe", "dualpipev"),
    "precision": ("bf16", "fp8"), "parallel.tp": (1, 2, 4, 8), "parallel.pp": (1, 2, 4, 8, 16),
    "parallel.ep": (1, 2, 8, 16, 32, 64),
    "parallel.cp": (1, 2), "parallel.vpp": (1, 2, 4), "parallel.microbatch": (1, 2, 4),
    "parallel.zero_stage": (0, 1, 2, 3),
    "parallel.expert_tp": (1, 2), "parallel.sequence_parallel": (True, False), "batch.sequences": (64, 960,
    3840, 15360),
    "batch.sequence_length": (1, 17, 512, 4096, 131072), "communication.sms": (0, 1, 8, 20, 24, 131),
    "seed": (0, 1, 2**62),
    "recompute": ("none", "attention", "selective", "full"), "routing.expert_load_cv": (0, 0.5, 3, "300 %",
    50),
    "routing.load": ({"kind": "uniform"}, {"kind": "zipf", "exponent": 0.5}, {"kind": "zipf", "exponent": 30},
                     {"kind": "bias", "affinity_spread": 0.3, "drift_steps": 100, "step": 50}),
    "routing.capacity": ({"factor": 1.25}, {"factor": 0.01, "per": "rank"}, {"factor": 1e-9},
    {"factor": 1e6}),
    "routing.eplb": ({"redundant_experts": 64}, {"redundant_experts": 0, "policy": "global"},
    {"redundant_experts": 3}),
    "routing.gate": ("model", "best", "top2-sum", "unlimited"), "routing.groups_per_token": (1, 2, 8),
    "variation.clock_cv": (0, 0.01, 0.5), "variation.jitter_cv": (0, 0.05, 1, 5), "resolution": ("folded",
    "full"),
    "spreading": ("modulo", "ecmp", "ideal"), "stages": ({"layers": [4, 4, 4, 4]}, {"blocks": ["moe*4",
    "moe*4"]}),
    "faults": ([{"kind": "down", "link": "plane:0"}], [{"kind": "slow-gpu", "gpu": 0, "speed": 0.5}],
               [{"kind": "node-loss", "node": 0}], [{"kind": "jitter", "gpu": "all", "cv": 1.0}],
               [{"kind": "slow-link", "link": "plane:1", "bandwidth": 1e-9}]),
    "software.kernels": ("eager",), "software.host": ("xeon-8480c",), "software.cuda_graphs": (["whole"],
    ["attention"]),
    "software.overlap_tensor_parallel": ("full", "weight-gradient", "userbuffers", "async"),
    "software.overlap_data_parallel": (True,),
    "run.tokens": (1, 1e9, 1e15), "run.replicas": (1, 16), "profile": ("generic-roofline", "h200-measured",
    "h100-layers", "h800-trace"),
    "cluster.node.nic_bandwidth": ("1 kB/s", "1000 PB/s", "50 Gb/s"), "cluster.node.nics_per_gpu": (1, 2,
    1000),
    "cluster.price_per_gpu_hour": ("$0/h", "$1000000/h"),
    "cluster.node.accelerator.hbm_bandwidth": ("1 kB/s", "1 EB/s"),
}  # fmt: skip
"""Values that are legal with some of the others."""


def _plausible(m: Mutator) -> str:
    key = m.rng.choice(sorted(_PLAUSIBLE))
    return f"{key}={m.text_of(m.rng.choice(_PLAUSIBLE[key]))}"


def _presets(m: Mutator) -> str:
    names = moesim.presets()
    return m.rng.choice(names) if m.rng.random() < 0.9 else str(m.value(names[0]))


def link(m: Mutator) -> tuple[str, list[str]]:
    if m.rng.random() < 0.6:
        texts = [_plausible(m) for _ in range(m.rng.choice((1, 2, 3, 5)))]
        return m.rng.choice(moesim.presets()), [*texts, override(m)] if m.rng.random() < 0.3 else texts
    return _presets(m), [override(m) for _ in range(m.rng.choice((1, 1, 2, 3, 8)))]


def _built(name: str, texts: Sequence[str]) -> Scenario:
    """As a job of the dashboard does it, in this process."""
    jobs.check_link([name, *texts])
    return jobs.admit(uploads.scenario_of(name, texts))


def read_link(case: tuple[str, list[str]], folder: Path, rng: random.Random) -> None:
    name, texts = case
    read = [text[: jobs.LINK_CHARACTERS + 1] for text in texts[: jobs.LINK_TEXTS + 1]]
    scenario = _built(name[:200], read)
    scenario_links.overrides_between(home(), scenario)
    check(scenario, rng)


def upload(m: Mutator) -> tuple[str, str, bytes]:
    kind = m.rng.choice(sorted(uploads.ENDINGS))
    makers = {
        "scenario": described("simulator/data/scenarios"), "model": described("simulator/data/models"),
        "profile": described("hwmodels/data/calibration"), "topology": texts_of("", topology_texts),
        "histogram": texts_of("", count_texts), "load": texts_of("", load_texts),
    }  # fmt: skip
    data = makers[kind](m).data
    ending = m.rng.choice(uploads.ENDINGS[kind])
    name = f"file{ending}" if m.rng.random() < 0.8 else str(m.value(f"file{ending}"))
    if m.rng.random() < 0.15:
        name, data = f"file{ending}.gz", gzip.compress(data, 1, mtime=0)[: m.rng.choice((10**6, 20))]
    return kind, name, data


def read_upload(case: tuple[str, str, bytes], folder: Path, rng: random.Random) -> None:
    kind, name, data = case
    options = {"like": "hgx-h200"} if kind == "topology" else {}
    accepted = uploads.accept(kind, name, data, **options)
    uploads.path_of(accepted.token).unlink()


def kept_link(m: Mutator) -> str:
    """A scenario in a link of Compare."""
    text = json.dumps([_presets(m), _plausible(m), override(m)])
    return m.text(text) if m.rng.random() < 0.8 else m.hostile()


def read_kept_link(case: str, folder: Path, rng: random.Random) -> None:
    """As the page does before it simulates."""
    preset, texts = scenario_links.read(case)
    _built(preset, texts)


def values(m: Mutator) -> str:
    return m.text(
        m.rng.choice(
            ("8..256:x2", "bf16,fp8", "0..48:4", "1..8", "0..1:0.1", "50 GB/s,100 GB/s", "{kind: zipf, s: 1}")
        )
    )


def read_values(case: str, folder: Path, rng: random.Random) -> None:
    parse_values(case, "key")
