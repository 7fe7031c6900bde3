"""A plan for torchtitan: TOML for the release that reads it, a configuration function for newer ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import ConfigurationFile
from moesim.simulator.trainers.rules import PlanFacts
from moesim.simulator.trainers.torchtitan.rules import NEWEST, WITH_TOML, recompute_mode, release_of
from moesim.simulator.trainers.torchtitan.settings import (
    Setting,
    compiles_layers,
    local_batch,
    parallelism,
    titan_plan,
    training_steps,
    uses_deepep,
)

# -- snippet -----------------------------------------------------------------------------------------
# Writes a plan as a configuration function of torchtitan 0.3.0, whose configurations are Python.

FUNCTION = "moesim_plan"
"""Name of the function, for `--config`."""

_HEADER = f"""\
# Configuration of torchtitan {NEWEST}, written by moesim. Save it as a module on PYTHONPATH, such as plan.py:
#   torchrun ... -m torchtitan.train --module plan --config {FUNCTION}
# Paths and the learning rate are no part of a plan: change them where the comments say so.
"""

_ACTIVATIONS = {"none": "None", "full": "FullAC.Config()", "op": "SelectiveAC.Config()"}


def torchtitan_snippet(scenario: Scenario) -> str:
    """A Python module with a function that returns torchtitan's `Trainer.Config` for the plan.

    Comments on top say what torchtitan cannot do. Names: pytorch/torchtitan 0.3.0, config/configs.py,
    trainer.py and models/*/config_registry.py. Raises InputError for a model or cluster that cannot be
    loaded, and for a fleet.
    """
    titan = titan_plan(scenario, NEWEST)
    plan, release, family = titan.plan, titan.release, titan.family
    comments = "".join(f"# not spelled: {sentence}\n" for sentence in titan.missing)
    mtp = plan.shape.mtp_layers if family in release.mtp and plan.parallel.pp == 1 else 0
    package = family or "a_model_of_your_own"
    arguments = _model_arguments(plan, family, titan.flavor, mtp)
    lines = [
        f"def {FUNCTION}() -> Trainer.Config:",
        f"    model_spec = model_registry({arguments})",
        *_loss(mtp),
        "    config = Trainer.Config(",
        "        loss=loss,",
        "        model_spec=model_spec,",
        '        hf_assets_path="./assets/hf",  # tokenizer; not part of the plan',
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),  # not part of the plan',
        "        optimizer=default_adamw(lr=8e-4),  # learning rate not part of the plan",
        "        training=TrainingConfig(",
        *(f"            {name}={_literal(value)}," for name, value in _training(scenario, plan).items()),
        "        ),",
        f"        activation_checkpoint={_ACTIVATIONS[recompute_mode(plan) or 'op']},",
        f"        compile=CompileConfig({_compile(plan)}),",
        "    )",
        "    config.parallelism = ParallelismConfig(",
        *(f"        {name}={_literal(value)}," for name, value in parallelism(plan, release).items()),
        "    )",
        "    return config",
    ]
    return f"{_HEADER}{comments}{_imports(package, mtp)}\n\n" + "\n".join(lines) + "\n"


def _imports(package: str, mtp: int) -> str:
    loss = (
        "from torchtitan.models.deepseek_v3.mtp import MTPLoss"
        if mtp
        else "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss"
    )
    return "\n".join(
        [
            loss,
            "from torchtitan.components.optimizer import default_adamw",
            "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
            "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
            "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
            "from torchtitan.models.common.config_utils import decoder_vocab_size",
            f"from torchtitan.models.{package} import model_registry",
            "from torchtitan.trainer import Trainer",
            "",
        ]
    )


def _model_arguments(plan: PlanFacts, family: str | None, flavor: str | None, mtp: int) -> str:
    words = [_literal(flavor or "a-flavor-of-your-own")]
    if uses_deepep(plan, family, release_of(NEWEST)):
        words.append('moe_comm_backend="deepep"')
    if mtp:
        words.append(f"num_mtp_layers={mtp}")
    return ", ".join(words)


def _compile(plan: PlanFacts) -> str:
    if compiles_layers(plan):
        return "enable=True"
    return f'enable={plan.software.kernels == "fused"}, components=["loss"]'


def _loss(mtp: int) -> list[str]:
    vocabulary = "global_vocab_size=decoder_vocab_size(model_spec)"
    if mtp:
        return [f"    loss = MTPLoss.Config({vocabulary})"]
    return [
        f"    cross_entropy = CrossEntropyLoss.Config({vocabulary})",
        "    loss = ChunkedLossWrapper.Config(loss_fn=cross_entropy)",
    ]


def _training(scenario: Scenario, plan: PlanFacts) -> dict[str, Setting]:
    return {
        "local_batch_size": local_batch(plan),
        "global_batch_size": plan.sequences,
        "seq_len": plan.sequence_length,
        "steps": training_steps(scenario),
        "disable_cuda_graphs": "all" not in plan.software.cuda_graphs or plan.parallel.pp > 1,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
    }


def _literal(value: Setting) -> str:
    """A value in Python; stages are written one a line."""
    if isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    rows = "".join(f"            {json.dumps(part)},\n" for part in value)
    return f"[\n{rows}        ]"


# -- toml --------------------------------------------------------------------------------------------
# Writes a plan as a job configuration of torchtitan 0.2.2 in TOML.

NO_FLAVOR = "a-flavor-of-your-own"
"""Stands for the flavor of a model that torchtitan does not ship; torchtitan stops at this name."""

HEADER = f"""\
# Job configuration of torchtitan {WITH_TOML}, the last release that reads TOML, written by moesim.
# Paths, and the learning rate with its schedule, are no part of a plan. Give them on the command line:
#   --model.hf_assets_path --training.dataset --training.dataset_path --checkpoint.folder --optimizer.lr
"""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The text of a configuration file, and sentences on what it cannot express (comments of the text)."""

    text: str
    unspelled: tuple[str, ...]


def torchtitan_toml(scenario: Scenario) -> Configuration:
    """The job configuration of torchtitan 0.2.2 for a scenario's model, plan and run.

    Its first comments say what torchtitan cannot do. Raises InputError for a model or cluster that cannot be
    loaded, and for a fleet.
    """
    titan = titan_plan(scenario, WITH_TOML)
    plan, family, missing = titan.plan, titan.family, titan.missing
    tables: dict[str, Mapping[str, Setting | Sequence[str]]] = {
        "job": {"description": f"moesim plan of {scenario.name}"},
        "model": _model(plan, family, titan.flavor),
        "optimizer": {"name": "AdamW", "implementation": "fused"},
        "training": {
            "local_batch_size": local_batch(plan),
            "global_batch_size": plan.sequences,
            "seq_len": plan.sequence_length,
            "steps": training_steps(scenario),
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": _parallelism(plan, family),
        "checkpoint": {"enable": True},
        "activation_checkpoint": _activations(plan),
        "compile": {
            "enable": plan.software.kernels == "fused",
            "components": ["model", "loss"] if compiles_layers(plan) else ["loss"],
        },
    }
    if plan.recipe.linear == "fp8":
        tables |= _quantized(plan)
    comments = "".join(f"# not spelled: {sentence}\n" for sentence in missing)
    body = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
    return Configuration(f"{HEADER}{comments}\n{body}", missing)


def _model(plan: PlanFacts, family: str | None, flavor: str | None) -> dict[str, Setting | Sequence[str]]:
    model: dict[str, Setting | Sequence[str]] = {
        "name": family or _nearest_family(plan),
        "flavor": flavor or NO_FLAVOR,
    }
    if plan.recipe.linear == "fp8":
        grouped = ["quantize.grouped_mm.float8"] if plan.shape.moe is not None else []
        model["converters"] = ["quantize.linear.float8", *grouped]
    return model


def _nearest_family(plan: PlanFacts) -> str:
    """The package whose architecture is nearest to a model that has no flavor."""
    if plan.shape.moe is None:
        return "llama3"
    attention = plan.shape.attention
    return "deepseek_v3" if attention is not None and attention.kind == "mla" else "qwen3"


def _parallelism(plan: PlanFacts, family: str | None) -> dict[str, Setting | Sequence[str]]:
    release = release_of(WITH_TOML)
    fields: dict[str, Setting | Sequence[str]] = dict(parallelism(plan, release))
    if plan.shape.moe is not None and plan.parallel.ep > 1:
        fields["expert_tensor_parallel_degree"] = plan.parallel.expert_tp
        deepep = uses_deepep(plan, family, release)
        fields["expert_parallel_comm_backend"] = "deepep" if deepep else "standard"
    return fields


def _activations(plan: PlanFacts) -> dict[str, Setting | Sequence[str]]:
    mode = recompute_mode(plan)
    if mode in ("none", "full"):
        return {"mode": mode}
    return {"mode": "selective", "selective_ac_option": "op"}


def _quantized(plan: PlanFacts) -> dict[str, Mapping[str, Setting | Sequence[str]]]:
    linear: dict[str, Setting | Sequence[str]] = {
        "enable_fsdp_float8_all_gather": plan.recipe.parameter_gather == "fp8",
        "precompute_float8_dynamic_scale_for_fsdp": plan.recipe.parameter_gather == "fp8",
        "filter_fqns": ["output", "router.gate"],
    }
    tables: dict[str, Mapping[str, Setting | Sequence[str]]] = {"quantize.linear.float8": linear}
    if plan.shape.moe is not None:
        tables["quantize.grouped_mm.float8"] = {"fqns": ["experts"]}
    return tables


def _value(value: Setting | Sequence[str]) -> str:
    """A value in TOML; strings of JSON are basic strings of TOML, apart from the delete character."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {json.dumps(part)},\n" for part in value) + "]"
    return json.dumps(value).replace("\x7f", "\\u007f")


def torchtitan_command(config_file: str) -> tuple[str, ...]:
    """Words after `torchrun` that start torchtitan 0.2.2; the job file fills in the variables of paths."""
    return (
        "-m",
        "torchtitan.train",
        f"--job.config_file={config_file}",
        "--model.hf_assets_path=${TOKENIZER_MODEL}",
        "--training.dataset_path=${DATA_PATH}",
        "--checkpoint.folder=${CHECKPOINT_DIR}",
    )


def torchtitan_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The configuration of a release of torchtitan for a scenario's plan.

    Raises InputError for a model or cluster that cannot be loaded, and for a fleet.
    """
    label = f"torchtitan {version}"
    if version == WITH_TOML:
        configuration = torchtitan_toml(scenario)
        words = torchtitan_command("${PLAN_FILE}")
        return ConfigurationFile(label, configuration.text, configuration.unspelled, words)
    text = torchtitan_snippet(scenario)
    return ConfigurationFile(label, text, titan_plan(scenario, version).missing)
