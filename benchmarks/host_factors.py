"""Entries of a host's file from measured blocks: ratios by kind of block, hooks, checkpoints and graphs.

    python benchmarks/host_factors.py ONE.json [TWO.json]

ONE and TWO are results of `kernels/calibrate/studies/host_blocks.py`. For every family the script builds the
same small model in moesim, counts its calls at the times of single calls, and compares the sum with the block.
"""

from __future__ import annotations

import json
import statistics
import sys
from math import fsum
from pathlib import Path
from typing import Any

from moesim.hwmodels.host import Host, load_host
from moesim.simulator.cost.host import HostTimes
from moesim.simulator.cost.launches import BACKWARD, FORWARD
from moesim.simulator.model.attention import GQA, MLA
from moesim.simulator.model.calls import calls_of
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape, ShapeSource
from moesim.simulator.model.software import Software
from moesim.simulator.predict.compile import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.run_plan import RunPlan
from moesim.simulator.scenario.scenario import Batch, Communication
from moesim.simulator.scoring.scoreboard.runs import MIXED

FAMILY = {
    "llama3": "dense",
    "qwen3": "dense",
    "qwen3_moe": "routed",
    "deepseek_v3": "latent routed",
    "deepseek_v3_groups": "latent routed",
}
HOST = "emerald-rapids-vm"


def shape(family: str) -> ModelShape:
    """The measured tiny model of a family."""
    latent = family.startswith("deepseek")
    attention: GQA | MLA = GQA(heads=4, kv_heads=2, head_dim=64, qk_norm=family.startswith("qwen3"))
    if latent:
        rank = 96 if family.endswith("groups") else None
        attention = MLA(heads=4, q_lora_rank=rank, kv_lora_rank=64, qk_nope_dim=64, qk_rope_dim=32, v_dim=64)
    moe = None
    if latent or family.endswith("moe"):
        shared = {"shared_experts": 1, "shared_ffn": 128} if latent else {}
        scoring = "sigmoid" if family.endswith("groups") else "softmax"
        moe = MoE(experts=16, top_k=4, expert_ffn=128, scoring=scoring, dense_layers=(), **shared)
    return ModelShape(
        name=family,
        source=ShapeSource(kind="assumed", reference="host_blocks.py", date="2026-11-22"),
        n_layers=2,
        hidden=256,
        vocab=512,
        attention=attention,
        moe=moe,
        dense_ffn=512 if family == "qwen3" else 704,
        tied_embeddings=False,
    )


def calls_s(family: str, host: Host, recompute: str = "none") -> dict[str, tuple[float, float]]:
    """Seconds of a block's calls in a row, and the number of its forward calls, by pass."""
    scenario = Scenario(
        name=family,
        model=shape(family),
        cluster="h200-8",
        profile="h200-8gpu",
        precision=MIXED,
        parallel=ParallelPlan(pp=1, ep=1, microbatch=1, zero_stage=1),
        schedule="1f1b",
        batch=Batch(sequences=8, sequence_length=128),
        communication=Communication(kernels="nccl"),
        recompute=recompute,  # type: ignore[arg-type]
        run=RunPlan(tokens=1024.0),
        software=Software(kernels="eager"),
    )
    pricer = prepare(scenario).pricer
    kind = next(k for k in pricer.shape.block_kinds if k in ("moe", "dense"))
    times = HostTimes(host.model_copy(update={"in_block": {}}))
    found = {}
    for name, phases in (("forward", FORWARD), ("backward", BACKWARD)):
        operators = [op for phase in phases for op in pricer.operators(kind).get(phase, ())]
        calls = [call for op in operators for call in calls_of(op, "torch")]
        seconds = fsum(c.times * times.call_s(c.kind, c.forward) for c in calls)
        found[name] = (seconds, fsum(c.times for c in calls if c.forward))
    return found


def main() -> None:
    """Print what the measured blocks give."""
    results = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    blocks: dict[str, Any] = {k: v for r in results for k, v in r["blocks"].items() if "forward_us" in v}
    parts: dict[str, Any] = {k: v for r in results for k, v in r["parts"].items()}
    host = load_host(HOST)

    def us(name: str, side: str) -> float:
        return float(blocks[name][f"{side}_us"])

    print("single calls", {k: {s: round(v, 1) for s, v in row.items()} for k, row in parts["single calls"].items()})
    ratios: dict[str, list[tuple[str, float, float]]] = {}
    for family, group in FAMILY.items():
        name = f"{family} tiny"
        if name not in blocks:
            continue
        own = calls_s(family, host)
        pair = [us(name, side) * 1e-6 / own[side][0] for side in ("forward", "backward")]
        ratios.setdefault(group, []).append((family, pair[0], pair[1]))
        print(
            f"{name}: measured {us(name, 'forward'):.0f} and {us(name, 'backward'):.0f} us, calls "
            f"{own['forward'][0] * 1e6:.0f} and {own['backward'][0] * 1e6:.0f} us, ratios {pair[0]:.3f} {pair[1]:.3f}"
        )
    for group, rows in ratios.items():
        means = [statistics.fmean(row[i] for row in rows) for i in (1, 2)]
        print(f"in_block {group}: forward {means[0]:.3f} backward {means[1]:.3f}")
    every = [row for rows in ratios.values() for row in rows]
    for i, side in ((1, "forward"), (2, "backward")):
        values = [row[i] for row in every]
        print(f"other {side}: {statistics.fmean(values):.3f}, from {min(values):.3f} to {max(values):.3f}")
    more(blocks, us, host)


def more(blocks: dict[str, Any], us: Any, host: Host) -> None:
    """Print the differences between wrapped and plain blocks, and the checkpoints."""
    for name in blocks:
        for plain, wrapped in (
            (" fsdp1", "fsdp of one"),
            (" fsdp2", "fsdp of two"),
            (" tp2", "dtensor of two"),
        ):
            base = name.split(" ")[0] + " tiny"
            if name == base + plain and base in blocks:
                rest = [us(name, side) - us(base, side) for side in ("forward", "backward")]
                print(f"{wrapped}, {base}: {rest[0]:.0f} and {rest[1]:.0f} us more")
        for mode in ("op", "full"):
            tail = f" checkpoint-{mode}"
            plain = name.removesuffix(tail)
            family = name.split(" ")[0]
            if name.endswith(tail) and plain in blocks and family in FAMILY:
                rest = [us(name, side) - us(plain, side) for side in ("forward", "backward")]
                again = us(family + " tiny", "forward") if family + " tiny" in blocks else 0.0
                counted = calls_s(family, host, "full" if mode == "full" else "op")
                print(
                    f"checkpoint {mode}, {plain}: {rest[0]:.0f} and {rest[1]:.0f} us more; its forward again "
                    f"{again:.0f} us; forward calls {counted['forward'][1]:.0f}, again {counted['backward'][1]:.0f}"
                )
        if " ep2" in name and name.replace(" ep2", "") in blocks:
            plain = name.replace(" ep2", "")
            rest = [us(name, side) - us(plain, side) for side in ("forward", "backward")]
            print(f"expert parallel of two, {plain}: {rest[0]:.0f} and {rest[1]:.0f} us more")


if __name__ == "__main__":
    main()
