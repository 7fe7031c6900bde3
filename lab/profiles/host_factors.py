"""Entries of a host's file from measured blocks: ratios by kind of block, hooks, checkpoints and graphs.

    python -m lab.profiles.host_factors lab/results/2026-11-22-h200-host-blocks.json.xz
    python -m lab.profiles.host_factors lab/results/2026-11-22-h200-x2-compiled-blocks.json.xz

The first file holds the results of `lab/studies/host_blocks.py` on one and on two GPUs. For
every family the script builds the same small model in moesim, counts its calls at the times of single calls,
and compares the sum with the block. What wraps blocks is the mean difference between wrapped and plain ones.
The second file holds those of `compiled_blocks.py`, which ran every compiled block after its eager one.
"""

from __future__ import annotations

import json
import statistics
import sys
from math import fsum
from typing import Any

from lab import packed
from moesim.hwmodels.host import Host, load_host
from moesim.simulator.cost.launches import HostTimes
from moesim.simulator.cost.launches import BACKWARD, FORWARD
from moesim.simulator.frameworks.software import Software
from moesim.simulator.model.attention import GQA, MLA
from moesim.simulator.model.calls import calls_of
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.shape import ModelShape, ShapeSource
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.scenario.run_plan import RunPlan
from moesim.simulator.scenario.sections import Batch
from moesim.simulator.scenario.sections import Communication
from moesim.simulator.scoring.scoreboard.runs import MIXED

FAMILY = {
    "llama3": "dense",
    "qwen3": "dense",
    "qwen3_moe": "routed",
    "deepseek_v3": "latent routed",
    "deepseek_v3_groups": "latent routed",
}
HOST = "emerald-rapids-vm"
SIDES = ("forward", "backward")
EXCHANGE_US = 890.0
"""Host time of the counts and of two exchanges of rows in a routed block, from the host's file."""


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
        software=Software(framework="none", kernels="eager"),
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


class Blocks:
    """Measured microseconds of blocks by case and pass."""

    def __init__(self, results: dict[str, Any]) -> None:
        """Take the blocks that ran."""
        both = (results["one"]["blocks"], results["two"]["blocks"])
        self.rows = {name: row for part in both for name, row in part.items() if "forward_us" in row}

    def us(self, name: str, forward: bool) -> float:
        """Median of a case."""
        return float(self.rows[name]["forward_us" if forward else "backward_us"])

    def more(self, name: str, than: str, forward: bool) -> float:
        """Microseconds that one case takes more than another."""
        return self.us(name, forward) - self.us(than, forward)


def main() -> None:
    """Print what the measured blocks give."""
    results = json.loads(packed.text(sys.argv[1]))
    if "one" not in results:
        compiled(results["two"]["blocks"])
        print_graphs(results["two"]["parts"])
        return
    blocks, host = Blocks(results), load_host(HOST)
    ratios(blocks, host)
    wrapped(blocks)
    checkpointed(blocks, host)
    print_graphs(results["one"]["parts"])
    automatic = results["one"]["parts"]["garbage collection"]["automatic"]
    spent = fsum(seconds for _, seconds in automatic["collections"])
    share = spent / (automatic["steps"] * automatic["step"]["us"] * 1e-6)
    print("collector: share", round(share, 4), "full", automatic["collect 2 after the steps, s"])


def print_graphs(parts: dict[str, Any]) -> None:
    """Print the host time of a block that is one graph; the host's file has the mean of both files."""
    rows = [parts[f"graphs {family}"]["layer"] for family in ("llama3", "qwen3_moe")]
    print("graph", [round(statistics.fmean(row[f"{side}_us"] for row in rows)) for side in SIDES])


def compiled(rows: dict[str, Any]) -> None:
    """Print the ratio of each compiled block to its eager one, and what DTensor adds to a compiled block."""
    for name, row in rows.items():
        eager = rows.get(name.replace(" compiled", ""), {})
        if " compiled" in name and "forward_us" in row and "forward_us" in eager:
            ratio = [row[f"{side}_us"] / eager[f"{side}_us"] for side in SIDES]
            print(
                f"{name}: {[round(row[f'{side}_us']) for side in SIDES]} us, {[round(r, 3) for r in ratio]}"
            )
    for kind in ("", " compiled"):
        pair = (rows[f"llama3 tiny tp2{kind}"], rows[f"llama3 tiny{kind}"])
        more = [round(pair[0][f"{side}_us"] - pair[1][f"{side}_us"]) for side in SIDES]
        print(f"dtensor{kind}: {more} us more")


def ratios(blocks: Blocks, host: Host) -> None:
    """Print the ratios of measured blocks to the sums of their calls, and the range over them."""
    groups: dict[str, list[tuple[float, float]]] = {}
    totals = []
    for family, group in FAMILY.items():
        own = calls_s(family, host)
        measured = [blocks.us(f"{family} tiny", side == "forward") * 1e-6 for side in SIDES]
        pair = (measured[0] / own["forward"][0], measured[1] / own["backward"][0])
        groups.setdefault(group, []).append(pair)
        totals.append((sum(measured), own))
        print(f"{family}: {[round(m * 1e6) for m in measured]} us, ratios {pair[0]:.3f} {pair[1]:.3f}")
    for group, rows in groups.items():
        print(f"in_block {group}: {[round(statistics.fmean(row[i] for row in rows), 3) for i in (0, 1)]}")
    every = [row for rows in groups.values() for row in rows]
    mean = [statistics.fmean(row[i] for row in every) for i in (0, 1)]
    print(f"in_block other: {mean[0]:.3f} {mean[1]:.3f}")
    spread = [total / (own["forward"][0] * mean[0] + own["backward"][0] * mean[1]) for total, own in totals]
    print("blocks over what `other` gives:", [round(s, 2) for s in spread])


def wrapped(blocks: Blocks) -> None:
    """Print what FSDP2, expert parallelism and DTensor add to a block."""
    for name, pairs in (
        ("fsdp of one", [(f"{f} tiny fsdp1", f"{f} tiny") for f in ("llama3", "qwen3_moe", "deepseek_v3")]),
        ("fsdp", [(f"{f} tiny fsdp2", f"{f} tiny") for f in ("llama3", "qwen3_moe")]),
        ("experts over two", [("qwen3_moe tiny fsdp2 ep2", "qwen3_moe tiny fsdp2")]),
        ("dtensor", [(f"{f} tiny tp2", f"{f} tiny") for f in ("llama3", "qwen3")]),
    ):
        for forward in (True, False):
            each = [blocks.more(*pair, forward) for pair in pairs]
            print(name, SIDES[not forward], round(statistics.fmean(each)), [round(e) for e in each])


def checkpointed(blocks: Blocks, host: Host) -> None:
    """Print what checkpoints add: for a block and for a call of its forward."""
    own = {family: calls_s(family, host)["forward"][1] for family in FAMILY}
    for mode in ("full", "op"):
        sums: dict[str, list[tuple[float, float]]] = {}
        for name in blocks.rows:
            plain, _, found = name.rpartition(" checkpoint-")
            family = name.split(" ")[0]
            if found != mode or family not in own or " tp2" in name:
                continue
            again = blocks.us(f"{family} tiny", True)
            if " ep2" in plain:  # the exchange of rows runs again as well
                again += EXCHANGE_US
            forward, backward = (blocks.more(name, plain, side) for side in (True, False))
            sums.setdefault(family, []).append((forward, backward - again))
            print(f"{name}: {forward:.0f} and, without the forward again, {backward - again:.0f} us more")
        for i, side in enumerate(SIDES):
            points = [(own[f], statistics.fmean(row[i] for row in rows)) for f, rows in sums.items()]
            slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
            calls = [row[i] / own[f] for f, rows in sums.items() for row in rows]
            mean = statistics.fmean(calls)
            print(f"{mode} {side}: {slope:.1f} us a call + {intercept:.0f} us, or {mean:.1f} a call")


if __name__ == "__main__":
    main()
