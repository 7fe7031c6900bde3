"""The exports of the sample, by file name: what the trainers' own readers are asked to accept."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sample import build, draw_plans

from moesim.simulator.model.attention.grouped_query import GQA
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.counts import parameters_mtp, parameters_total
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario, load_scenario, preset_names
from moesim.simulator.trainers import bridge as bridge
from moesim.simulator.trainers import deepspeed as deepspeed
from moesim.simulator.trainers.rules import PlanFacts, facts_of
from moesim.simulator.trainers.jobs import JobTemplate, job_text
from moesim.simulator.trainers.torchtitan import rules
from moesim.simulator.trainers.torchtitan.rules import flavor_of
from moesim.simulator.trainers.torchtitan.export import torchtitan_snippet
from moesim.simulator.trainers.torchtitan.export import torchtitan_toml

SEED = 20261124
PLANS = Path(__file__).with_name("plans.json")
"""The sample: scenario data by trainer and name, drawn once by `python exports.py --draw`."""

DISPATCHERS = {"DeepSpeed": {"kernels": "nccl"}}
"""The section `communication` of the plans of a trainer that has no DeepEP."""


@dataclass(frozen=True)
class Export:
    """One file, and what its reader must find in it."""

    file: str
    text: str
    expected: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Checksum of the text in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _plans(trainer: str) -> Iterator[tuple[str, Scenario]]:
    for name, data in json.loads(PLANS.read_text("utf-8"))[trainer].items():
        yield name, build(name, data)


def draw() -> None:
    """Draw the sample anew; plans that a trainer cannot run are left out."""
    rules = {
        "torchtitan 0.2.2": runnable("0.2.2"),
        "torchtitan 0.3.0": runnable("0.3.0"),
        "Megatron-Bridge": lambda plan: tuple(bridge.bridge_problems(plan)),
        "DeepSpeed": lambda plan: tuple(deepspeed.deepspeed_problems(plan)),
    }
    sample = {
        trainer: dict(draw_plans(SEED, problems, communication=DISPATCHERS.get(trainer)))
        for trainer, problems in rules.items()
    }
    blocks = []
    for trainer, plans in sample.items():
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(data)}" for name, data in plans.items())
        blocks.append(f"{json.dumps(trainer)}: {{\n{rows}\n}}")
    PLANS.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def runnable(version: str) -> Callable[[PlanFacts], tuple[str, ...]]:
    """Problems of a plan in one release of torchtitan, of which a missing flavor is one."""

    def problems(plan: PlanFacts) -> tuple[str, ...]:
        if flavor_of(plan.shape, version) is None:
            return ("no flavor",)
        return rules.problems(plan, version)

    return problems


def _expected(scenario: Scenario) -> dict[str, Any]:
    plan, p = facts_of(scenario), scenario.parallel
    return {
        "parameters": _parameters(plan.shape),
        "world_size": plan.n_gpus,
        "microbatches": plan.microbatches,
        "tp": p.tp,
        "cp": p.cp,
        "pp": p.pp,
        "ep": p.ep,
        "schedule": (rules.torch_name(plan.schedule) or "") if p.pp > 1 else "",
        "stages": 0 if plan.layers is None else len(plan.layers),
        "sequences": plan.sequences,
        "microbatch": p.microbatch,
        "zero": p.zero_stage,
    }


def _parameters(shape: ModelShape) -> int:
    """Parameters without the balance biases, which torchtitan keeps as buffers."""
    moe = shape.moe
    biased = (
        moe.experts * (shape.n_layers - len(moe.dense_layers)) if moe is not None and moe.score_bias else 0
    )
    return parameters_total(shape) + parameters_mtp(shape) - biased


def torchtitan_exports() -> Iterator[Export]:
    """TOML files for 0.2.2 and Python modules for 0.3.0."""
    for name, scenario in _plans("torchtitan 0.2.2"):
        yield Export(f"{name}.toml", torchtitan_toml(scenario).body, _expected(scenario))
    for name, scenario in _plans("torchtitan 0.3.0"):
        module = f"plan_{name.replace('-', '_')}.py"
        yield Export(module, torchtitan_snippet(scenario), _expected(scenario))


def bridge_exports() -> Iterator[Export]:
    """Python modules that set a plan in Megatron-Bridge's configuration."""
    for name, scenario in _plans("Megatron-Bridge"):
        expected = _expected(scenario) | {"model": _core_model(scenario.shape)}
        yield Export(
            f"bridge_{name.replace('-', '_')}.py", bridge.bridge_overrides(scenario).text(), expected
        )


def _core_model(shape: ModelShape) -> dict[str, Any]:
    """Sizes that Megatron-Core's TransformerConfig needs beside the plan; `latent` chooses its class."""
    attention, moe = shape.attention, shape.moe
    assert isinstance(attention, GQA | MLA)
    sizes: dict[str, Any] = {
        "latent": isinstance(attention, MLA),
        "num_layers": shape.n_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads if isinstance(attention, GQA) else attention.heads,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }
    if moe is not None:
        sizes |= {"num_moe_experts": moe.experts, "moe_router_topk": moe.top_k}
        sizes |= {"moe_ffn_hidden_size": moe.expert_ffn, "moe_router_pre_softmax": moe.top_k == 1}
    return sizes


def deepspeed_exports() -> Iterator[Export]:
    """JSON configurations of DeepSpeed."""
    for name, scenario in _plans("DeepSpeed"):
        text = deepspeed.deepspeed_plan(scenario).text()
        whole = scenario.recompute == "full"
        expected = _expected(scenario) | {"recomputed": whole}
        expected["interval"] = int(whole and scenario.parallel.pp > 1)
        yield Export(f"deepspeed_{name.replace('-', '_')}.json", text, expected)


COMMAND = (
    "${MEGATRON_PATH}/pretrain_gpt.py",
    *("--pipeline-model-parallel-layout", "Et*3|(tt|)*29,m|L", "--moe-layer-freq", "([0]*3+[1]*58)"),
    *("--data-path", "${DATA_PATH}", "--save", "${CHECKPOINT_DIR}"),
)
SITE = JobTemplate.model_validate(
    {
        "partition": "gpu",
        "account": "research",
        "image": "registry.example/megatron:25.09",
        "namespace": "training",
        "rdma_resource": "rdma/hca_shared_devices_a",
        "rdma_count": 8,
        "claims": {"corpus": "/data"},
        "gpus_per_host": 4,
        "cpus_per_gpu": 12,
        "socket_interface": "=eth0",
        "paths": {
            "DATA_PATH": "/data/corpus",
            "CHECKPOINT_DIR": "/data/run",
            "MEGATRON_PATH": "/opt/megatron",
        },
    }
)


def job_exports() -> Iterator[Export]:
    """Job files of the shipped scenarios, without and with a site's template."""
    for preset in preset_names():
        scenario = load_scenario(preset)
        for site in (None, SITE):
            if site is None and scenario.machine.node.n_gpus > 8:
                continue  # the hosts of a scale-up domain are known from a template only
            for kind, ending in (("slurm", "sh"), ("kubernetes", "yaml")):
                text = job_text(kind, scenario, COMMAND, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, site, 86_400.0)
                name = f"job_{preset.replace('-', '_')}_{'plain' if site is None else 'site'}.{ending}"
                yield Export(name, text, {"gpus": scenario.machine.n_gpus})


def all_exports() -> list[Export]:
    """Every export of the proof."""
    return [*torchtitan_exports(), *bridge_exports(), *deepspeed_exports(), *job_exports()]


def index(exports: list[Export]) -> str:
    """The list of files with their checksums and expected values, as JSON."""
    entries = [{"file": e.file, "sha256": e.sha256, "expected": e.expected} for e in exports]
    return json.dumps(entries, indent=1) + "\n"


def write(folder: Path) -> None:
    """Write the exports and their index into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    exports = all_exports()
    for export in exports:
        (folder / export.file).write_text(export.text, encoding="utf-8")
    (folder / "index.json").write_text(index(exports), encoding="utf-8")


if __name__ == "__main__":
    draw() if sys.argv[1] == "--draw" else write(Path(sys.argv[1]))
