"""Writes random plans as arguments, has Megatron-LM's own parser judge them, and keeps the verdicts.

    python lab/proofs/trainers/judge_plans.py --python judge/bin/python --tree 0.20=<tree> --tree 0.14=<tree>

`lab/docs/proof/megatron-verdicts.json` is written anew; a fast test checks that the exports of
today are those that were judged. Controls are plans with one argument spoilt, which the parser must refuse.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from draw_plans import MODELS, drawn

from moesim.simulator.model.counts import parameters_mtp, parameters_total
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules.interleaved import per_round
from moesim.simulator.trainers.export import Arguments
from moesim.simulator.trainers.megatron.arguments import megatron_arguments
from moesim.simulator.trainers.registry import trainer_of

HERE = Path(__file__).parent
VERDICTS = HERE.resolve().parents[2] / "lab" / "docs" / "proof" / "megatron-verdicts.json"
LAYOUT = "--pipeline-model-parallel-layout"
CONTROLS = {
    "virtual stages beside a layout": ("mixtral-8x7b", ["--num-virtual-stages-per-pipeline-rank", "2"]),
    "a module of another attention": (
        "qwen3-30b-a3b",
        ["--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj"],
    ),
    "a layer more than the layout has": ("llama-3-70b", ["--num-layers", "81"]),
    "Megatron-FSDP without its checkpoints": (
        "deepseek-v3",
        ["--use-megatron-fsdp", "--ckpt-format", "torch_dist"],
    ),
    "an argument that does not exist": ("mixtral-8x22b", ["--expert-parallel", "8"]),
    "more tensor-parallel ranks than GPUs": ("qwen3-235b-a22b", ["--tensor-model-parallel-size", "4096"]),
}
"""Plans that must be refused: a drawn plan of a model (`_is_plain`) with more arguments."""
FILLED = {
    "LEARNING_RATE": "0.0001",
    "DATA_PATH": "/data/text_document",
    "TOKENIZER_MODEL": "/models/tokenizer",
    "CHECKPOINT_DIR": "/checkpoints",
    "ROTARY_BASE": "10000",
}


def plans(version: str, count: int, seed: int = 0) -> dict[str, tuple[Scenario, Arguments]]:
    """Drawn plans with their exports, by name."""
    trainer = trainer_of(f"megatron@{version}")
    found = {}
    for model in MODELS:
        for number, scenario in enumerate(drawn(trainer, model, count, seed)):
            found[f"{model}-{number}"] = (scenario, megatron_arguments(scenario, version))
    return found


def digest(export: Arguments) -> str:
    """Hash of what is judged: GPUs, environment and arguments."""
    judged = [export.gpus, dict(export.environment), export.words(FILLED)]
    return hashlib.sha256(json.dumps(judged).encode()).hexdigest()[:16]


def expected(scenario: Scenario) -> dict[str, Any]:
    """What Megatron-LM must make of the arguments, from the plan that was priced."""
    plan, shape = scenario.parallel, scenario.shape
    replicas = scenario.machine.n_gpus // (plan.tp * plan.cp * plan.pp)
    layers = scenario.stages.layers or ()
    stages = [["decoder"] * n for n in layers]
    stages[0] = ["embedding", *stages[0]]
    stages[-1] = [*stages[-1], *["mtp"] * shape.mtp_layers, "loss"]
    return {
        "data_parallel": replicas,
        "microbatches": scenario.batch.sequences // (replicas * plan.microbatch),
        "vpp": plan.vpp,
        "stages": stages if plan.pp > 1 else None,
        "microbatch_group": per_round(plan.pp, scenario.batch.sequences // (replicas * plan.microbatch))
        if plan.vpp > 1
        else None,
        "sequence_parallel": plan.sequence_parallel,
        "expert_parallel": plan.ep,
        "distributed_optimizer": plan.zero_stage > 0,
    }


def judge(version: str, tree: Path, python: Path, count: int) -> dict[str, Any]:
    """Verdicts of one tree on the plans of one version."""
    exports = plans(version, count)
    todo: list[dict[str, Any]] = [
        {"id": name, "gpus": e.gpus, "environment": dict(e.environment), "arguments": e.words(FILLED)}
        for name, (_, e) in exports.items()
    ]
    todo += [
        {**plan, "id": name, "arguments": [*plan["arguments"], *more]}
        for name, (model, more) in CONTROLS.items()
        for plan in [p for p in todo if p["id"].startswith(model) and _is_plain(p)][:1]
    ]
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "plans.json"), Path(folder, "verdicts.json")
        asked.write_text(json.dumps(todo))
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        command = [str(python), str(HERE / "judge_megatron.py"), str(asked), str(answered)]
        subprocess.run(command, env=environment, check=True)
        answer = json.loads(answered.read_text())
    verdicts = {}
    controls = {name: answer["verdicts"][name]["message"] or "accepted" for name in CONTROLS}
    for name, (scenario, export) in exports.items():
        verdict = answer["verdicts"][name]
        message = verdict["message"] or _differs(verdict["facts"], expected(scenario))
        message = message or _another_model(verdict["facts"]["billions"], scenario.shape)
        verdicts[name] = [digest(export), message or "accepted"]
    head = {key: answer[key] for key in ("megatron_core", "torch", "python")}
    head |= {"date": datetime.date.today().isoformat(), "plans_a_model": count}
    return {**head, "controls": controls, "verdicts": verdicts}


def _is_plain(plan: dict[str, Any]) -> bool:
    """Whether a plan has a layout, and neither recompute nor a variable that excludes Megatron-FSDP."""
    words = plan["arguments"]
    return LAYOUT in words and "--recompute-granularity" not in words and not plan["environment"]


def _differs(facts: dict[str, Any], wanted: dict[str, Any]) -> str:
    wrong = [
        f"{key}={facts[key]!r} instead of {value!r}" for key, value in wanted.items() if facts[key] != value
    ]
    return "; ".join(wrong)[:400]


def _another_model(billions: list[str], shape: ModelShape) -> str:
    """Where Megatron-LM counts other parameters than the model has: "" if both agree to 0.2 %.

    Its newest report counts total and active parameters; that of core 0.14 has no latent attention.
    """
    counted = (parameters_total(shape) + parameters_mtp(shape), None)
    if len(billions) < 2:
        return ""
    wrong = [
        f"{text} billion parameters instead of {count / 1e9:.2f}"
        for text, count in zip(billions, counted, strict=True)
        if count is not None and abs(float(text) - count / 1e9) > 0.002 * count / 1e9 + 0.005
    ]
    return "; ".join(wrong)


def main() -> None:
    """Judge the plans with every tree, and write the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="Python of the judges' environment")
    parser.add_argument("--tree", action="append", required=True, metavar="VERSION=FOLDER")
    parser.add_argument("--count", type=int, default=200, help="plans a model")
    parser.add_argument("--output", type=Path, default=VERDICTS)
    given = parser.parse_args()
    found = {}
    for text in given.tree:
        version, _, folder = text.partition("=")
        found[version] = judge(version, Path(folder), given.python, given.count)
        refused = [name for name, (_, verdict) in found[version]["verdicts"].items() if verdict != "accepted"]
        print(
            f"{version}: {len(found[version]['verdicts'])} plans, {len(refused)} not accepted: {refused[:5]}"
        )
        for name in refused[:5]:
            print("   ", name, found[version]["verdicts"][name][1])
    given.output.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
