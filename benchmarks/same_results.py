"""Checks that a change of the code keeps results: writes the JSON of many predictions, compares two folders.

    python benchmarks/same_results.py write OUT [--only PART]
    python benchmarks/same_results.py compare BEFORE AFTER [--show 20]

Uses the public API alone, so that the same file runs on an older tree: set PYTHONPATH to its src and run it
from its root. Takes about ten minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

os.environ["MOESIM_CACHE"] = "off"

from msgspec import Struct

import moesim

HOME = "deepseek-v3-2048xh800"
SMALL = "tests/golden/scenario-small.yaml"
CLUSTER = (
    "cluster={node: hgx-h800, nodes: 16, network: mpft-ib-400g, name: 128xh800}",
    "parallel={tp: 1, pp: 4, ep: 16, cp: 1, microbatch: 1, zero_stage: 1}",
    "batch.sequences=256",
)
DENSE = "llama-3-70b-64xh100"

SIMULATED: dict[str, tuple[str, ...]] = {
    "home-h800-published": (HOME, "profile=h800-published"),
    "home-from-h200": (HOME, "profile=h800-from-h200"),
    "home-generic": (HOME, "profile=generic-roofline"),
    "home-sms-8": (HOME, "communication.sms=8"),
    "home-sms-32": (HOME, "communication.sms=32"),
    "home-nccl": (HOME, "communication.kernels=nccl"),
    "home-dualpipev": (HOME, "schedule=dualpipev", "parallel.pp=8"),
    "home-1f1b": (HOME, "schedule=1f1b"),
    "home-zb-h1": (HOME, "schedule=zb-h1"),
    "home-zbv": (HOME, "schedule=zbv"),
    "home-gpipe": (HOME, "schedule=gpipe", "batch.sequences=4096"),
    "home-interleaved": (HOME, "schedule=interleaved-1f1b", "parallel.vpp=2", "batch.sequences=16384"),
    "home-interleaved-zb": (
        HOME, "schedule=interleaved-zero-bubble", "parallel.vpp=2", "batch.sequences=16384"
    ),
    "home-full-recompute": (HOME, "recompute=full"),
    "home-no-recompute": (HOME, "recompute=none"),
    "home-op-recompute": (HOME, "recompute=op"),
    "home-bf16": (HOME, "precision=bf16"),
    "home-ep32": (HOME, "parallel.ep=32"),
    "home-tp2": (HOME, "parallel.tp=2", "parallel.sequence_parallel=true"),
    "home-cp2": (HOME, "parallel.cp=2"),
    "home-zipf": (HOME, "routing.load={kind: zipf, exponent: 0.5}"),
    "home-zipf-in-order": (HOME, "routing.load={kind: zipf, exponent: 0.5, shuffle_per_layer: false}"),
    "home-capacity": (HOME, "routing.capacity={factor: 1.0, per: rank}"),
    "home-redundant": (
        HOME, "routing.load={kind: zipf, exponent: 0.5}",
        "routing.eplb={redundant_experts: 64, policy: global}",
    ),
    "home-seed": (HOME, "seed=7"),
    "home-layers": (HOME, "stages.layers=[4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1]"),
    "home-64-routed-groups": (HOME, "routing.groups_per_token=8"),
    "home-overlap-dp": (HOME, "software.overlap_data_parallel=true"),
    "small": (SMALL,),
    "small-uneven": (SMALL, "routing.expert_load_cv=30 %", "variation.jitter_cv=3 %"),
    "small-capacity": (SMALL, "routing.capacity={factor: 0.5, per: rank}"),
    "small-eager": (SMALL, "software.kernels=eager"),
    "small-expert-tp": (
        SMALL,
        "parallel={tp: 2, pp: 4, ep: 4, expert_tp: 2, microbatch: 1, zero_stage: 1, sequence_parallel: true}",
    ),
    "small-zero-3": (SMALL, "parallel.zero_stage=3"),
    "small-zero-0": (SMALL, "parallel.zero_stage=0"),
    "dense-unfused": (DENSE, "software.attention=unfused", "software.dropout=true"),
    "dense-host": (DENSE, "software.host=xeon-8480c"),
    "dense-overlap": (
        DENSE, "software.overlap_tensor_parallel=full", "software.overlap_data_parallel=true"
    ),
    "dense-zero-3": (DENSE, "parallel.zero_stage=3", "parallel.pp=1", "parallel.vpp=1"),
    "dense-fp8-tensor": (DENSE, "precision={linear: fp8, scaling: tensor}"),
    "five-lines": ("examples/five-lines.yaml",),
    "mixtral-on-h200": ("examples/mixtral-on-h200.yaml",),
    "fleet": ("examples/mixed.yaml",),
    "fleet-interleaved": ("examples/mixed.yaml", "schedule=dualpipev"),
    "full-small": (SMALL, "resolution=full"),
    "full-small-uneven": (SMALL, "resolution=full", "routing.expert_load_cv=30 %"),
    "full-128": (HOME, *CLUSTER, "resolution=full"),
    "full-128-ecmp": (HOME, *CLUSTER, "resolution=full", "spreading=ecmp"),
    "fault-plane": (HOME, *CLUSTER, "resolution=full", "faults=[{kind: down, link: 'plane:3'}]"),
    "fault-slow": (
        HOME, *CLUSTER, "resolution=full", "faults=[{kind: slow-link, link: 'plane:3', bandwidth: 0.5}]"
    ),
    "fault-gpu": (HOME, *CLUSTER, "resolution=full", "faults=[{kind: slow-gpu, gpu: 5, speed: 0.8}]"),
    "run-report": (HOME, "run=deepseek-v3"),
}  # fmt: skip
INTERVALS = (HOME, "deepseek-v3-trace-pair", "mixtral-8x7b-64xh100", DENSE, SMALL)


def plain(value: Any) -> Any:
    """Any result as plain data."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def simulated() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Predictions of presets and of scenarios with overrides."""
    for name in moesim.presets():
        yield f"preset-{name}", lambda name=name: moesim.simulate(name)
    for name, (first, *overrides) in SIMULATED.items():
        yield name, lambda first=first, overrides=overrides: moesim.simulate(first, *overrides)


def studied() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Intervals, comparisons, sweeps, runs, checks."""
    for name in INTERVALS:
        stem = Path(name).stem
        yield f"interval-{stem}", lambda name=name: moesim.simulate(name, uncertainty=True)
    yield "run-home", lambda: moesim.run(HOME, uncertainty=False)
    yield "run-deepseek", lambda: moesim.run(HOME, "run=deepseek-v3", uncertainty=False)
    yield "run-dense", lambda: moesim.run(DENSE, uncertainty=False)
    yield "check-home", lambda: moesim.check(HOME)
    yield "check-fleet", lambda: moesim.check("examples/mixed.yaml")
    yield "timeline-pair", lambda: moesim.timeline("deepseek-v3-trace-pair")
    yield "explain-home", lambda: moesim.explain(HOME)
    home = moesim.load(HOME)
    yield "compare", lambda: moesim.compare([home, home.replace(communication={"sms": 8})])
    yield "neighbours", lambda: moesim.neighbours(home, moesim.simulate(home))
    yield "published", lambda: moesim.published(home, moesim.simulate(home))
    yield "score", lambda: moesim.score()
    sms = {"communication.sms": "8..24:8", "parallel.ep": [32, 64]}
    yield "sweep-home", lambda: moesim.sweep(home, sms, workers=1).rows()
    small = moesim.load(SMALL)
    points = {"batch.sequences": [32, 64], "parallel.zero_stage": [0, 1]}
    yield "sweep-small", lambda: moesim.sweep(small, points, workers=1).rows()
    yield "sensitivity", lambda: moesim.sensitivity("deepseek-v3-trace-pair")


def planned() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Plan searches."""
    few = {"tp": (1, 2), "zero_stage": (1,), "recompute": ("selective", "full")}
    for name in (HOME, "mixtral-8x7b-64xh100", DENSE, SMALL, "examples/mixed.yaml"):
        job = moesim.load(name)
        space = moesim.PlanSpace(**few, pp=(8, 16), ep=(32, 64)) if name == HOME else moesim.PlanSpace(**few)
        if name.endswith("mixed.yaml"):
            space = moesim.PlanSpace(**few, pp=(4, 8), ep=(8,), schedule=("1f1b", "dualpipev"))
        yield f"plan-{Path(name).stem}", lambda job=job, space=space: moesim.plan(job, space, top=3)


PARTS = {"simulated": simulated, "studied": studied, "planned": planned}


def write(out: Path, only: str | None) -> None:
    """One file a case: its result, or the error that it ends in."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for part, cases in PARTS.items():
        for name, call in cases() if only in (None, part) else ():
            try:
                value = plain(call())
            except moesim.MoesimError as error:
                value = {"error": str(error)}
            except Exception:
                value = {"exception": traceback.format_exc()}
            (out / f"{name}.json").write_text(json.dumps(value, indent=1, default=str) + "\n")
            print(f"{time.monotonic() - begin:6.0f} s  {name}", flush=True)


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Every place where two values of JSON differ."""
    if type(before) is not type(after):
        yield f"{path}: {before!r} -> {after!r}"
    elif isinstance(before, dict):
        for key in [*before, *(k for k in after if k not in before)]:
            if key not in after or key not in before:
                yield f"{path}.{key}: {'only before' if key in before else 'only after'}"
            else:
                yield from differences(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, list):
        if len(before) != len(after):
            yield f"{path}: {len(before)} -> {len(after)} entries"
        for n, (one, two) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, two, f"{path}.{n}")
    elif before != after:
        yield f"{path}: {before!r} -> {after!r}"


def compare(before: Path, after: Path, show: int) -> int:
    """Print what differs; the number of files that do."""
    names = sorted({p.name for p in before.glob("*.json")} | {p.name for p in after.glob("*.json")})
    unequal = 0
    for name in names:
        if not ((before / name).exists() and (after / name).exists()):
            print(f"{name}: only in one folder")
            unequal += 1
            continue
        one, two = (folder / name for folder in (before, after))
        old, new = json.loads(one.read_text()), json.loads(two.read_text())
        if one.read_text() == two.read_text():
            continue
        unequal += 1
        found = list(differences(old, new))
        print(f"{name}: {len(found)} differences")
        for line in found[:show]:
            print(f"    {line[:300]}")
    print(f"{len(names) - unequal} of {len(names)} files are byte-identical")
    return unequal


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write")
    writer.add_argument("out", type=Path)
    writer.add_argument("--only", choices=PARTS)
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--show", type=int, default=20)
    options = parser.parse_args()
    if options.command == "write":
        write(options.out, options.only)
    else:
        sys.exit(min(1, compare(options.before, options.after, options.show)))


if __name__ == "__main__":
    main()
