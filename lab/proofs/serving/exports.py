"""Launches of engines for the proof: plans of four models, and what is spoilt in some.

python lab/proofs/serving/exports.py FILE
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import moesim
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.serving.deployment import deployments
from moesim.simulator.serving.flags import VARIABLES, facts, serving_flags

MODELS = {
    "deepseek-v3": (
        {"dp": 8, "ep": 8},
        {"tp": 8, "ep": 8},
        {"dp": 32, "ep": 32},
        {"tp": 4, "dp": 2, "ep": 8},
    ),
    "qwen3-235b-a22b": ({"tp": 4}, {"dp": 8, "ep": 8}, {"tp": 8, "pp": 2}),
    "gpt-oss-120b": ({"tp": 2}, {"dp": 2, "ep": 2}),
    "llama-3-70b": ({"tp": 4}, {"tp": 8, "pp": 2}),
}
WIDE = {"exchange": "deepep", "redundant_experts": 32, "two_batch_overlap": True}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"cache": "fp8", "draft_tokens": 1, "max_num_seqs": 128, "max_num_batched_tokens": 16384},
    {"cuda_graphs": False, "prefix_caching": False, "memory_fraction": 0.85, "weights": "fp8"},
    {"draft_tokens": 3, **WIDE},
    {"prefill": {"tp": 8, "max_num_batched_tokens": 16384}, "replicas": 2},
    {"prefill": {"dp": 16, "ep": 16, **WIDE}, **WIDE},
)
FILLED = {"MODEL": "/models/model", "DRAFT_MODEL": "/models/draft", "HEAD_ADDRESS": "10.0.0.1:5000"}
FILLED |= {"NODE_RANK": "0", "FIRST_RANK": "0", "OPTIONS": "options.yaml"}
CONTROLS = {
    "vllm": (["--tensor-parallel", "many"], ["--deepep-mode", "auto"], ["--kv-cache-dtype", "fp3"]),
    "sglang": (["--tp-size", "many"], ["--enable-expert-parallel"], ["--moe-a2a-backend", "nccl"]),
    "trtllm": ({"tensor_parallel_size": "many"}, {"enable_dbo": True}, {"kv_cache_config": {"dtyp": "fp8"}}),
}
"""What is added to a launch that then must be refused."""
assert set(FILLED) == set(VARIABLES)


def launches(engine: str) -> list[dict[str, Any]]:
    """Launches of an engine, with facts of their pools; without plans that it cannot run."""
    found = []
    for model, places in MODELS.items():
        for number, (place, change) in enumerate((p, c) for p in places for c in CHANGES):
            data = {"model": model, "cluster": "h200-1024", "serving": {"engine": engine, **place, **change}}
            data["serving"]["load"] = {"rate_per_s": 1.0}
            try:
                scenario = moesim.load(data)
                made, pools = serving_flags(scenario), deployments(scenario)
            except (InputError, InfeasibleError):
                continue
            for launch, pool in zip(made.launches, pools, strict=True):
                judged = {"words": launch.command(FILLED), "options": launch.options}
                text = json.dumps(judged, sort_keys=True)
                row = {"name": f"{model}-{number}-{launch.role}", **judged, "facts": facts(pool)}
                found.append(row | {"sha256": hashlib.sha256(text.encode()).hexdigest()[:16]})
    return found


if __name__ == "__main__":
    engines = {engine: launches(engine) for engine in ("vllm-0.19", "sglang-0.5", "trtllm-1.2")}
    Path(sys.argv[1]).write_text(json.dumps({"engines": engines, "controls": CONTROLS}), encoding="utf-8")
