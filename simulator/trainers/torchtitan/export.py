"""A plan for torchtitan: TOML for the release that reads it, a configuration function for newer ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import ConfigurationFile
from moesim.simulator.trainers.rules import PlanFacts
from moesim.simulator.trainers.torchtitan.rules import NEWEST, WITH_TOML, recompute_mode
from moesim.simulator.trainers.torchtitan.settings import (
    Setting,
    compiles_layers,
    parallelism,
    titan_plan,
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

_IMPORTS = """\
from torchtitan.{loss}
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{package} import model_registry
from torchtitan.trainer import Trainer
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
    vocabulary = "global_vocab_size=decoder_vocab_size(model_spec)"
    loss_import = "components.loss import ChunkedLossWrapper, CrossEntropyLoss"
    loss = [
        f"    cross_entropy = CrossEntropyLoss.Config({vocabulary})",
        "    loss = ChunkedLossWrapper.Config(loss_fn=cross_entropy)",
    ]
    arguments = _literal(titan.flavor or NO_FLAVOR)
    if uses_deepep(plan, family, release):
        arguments += ', moe_comm_backend="deepep"'
    if mtp:
        loss_import = "models.deepseek_v3.mtp import MTPLoss"
        loss = [f"    loss = MTPLoss.Config({vocabulary})"]
        arguments += f", num_mtp_layers={mtp}"
    compiled = "enable=True"
    if not compiles_layers(plan):
        compiled = f'enable={plan.software.kernels == "fused"}, components=["loss"]'
    training = _training(scenario, plan, "disable_cuda_graphs")
    imports = _IMPORTS.format(loss=loss_import, package=family or "a_model_of_your_own")
    lines = [
        f"def {FUNCTION}() -> Trainer.Config:",
        f"    model_spec = model_registry({arguments})",
        *loss,
        "    config = Trainer.Config(",
        "        loss=loss,",
        "        model_spec=model_spec,",
        '        hf_assets_path="./assets/hf",  # tokenizer; not part of the plan',
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),  # not part of the plan',
        "        optimizer=default_adamw(lr=8e-4),  # learning rate not part of the plan",
        "        training=TrainingConfig(",
        *(f"            {name}={_literal(value)}," for name, value in training.items()),
        "        ),",
        f"        activation_checkpoint={_ACTIVATIONS[recompute_mode(plan) or 'op']},",
        f"        compile=CompileConfig({compiled}),",
        "    )",
        "    config.parallelism = ParallelismConfig(",
        *(f"        {name}={_literal(value)}," for name, value in parallelism(plan, release).items()),
        "    )",
        "    return config",
    ]
    return f"{_HEADER}{comments}{imports}\n\n" + "\n".join(lines) + "\n"


def _training(scenario: Scenario, plan: PlanFacts, own: str) -> dict[str, Setting]:
    """Fields of the section `training`, with the one that only this release has."""
    several = plan.parallel.pp > 1  # a call takes all micro-batches of a pipeline, else one micro-batch
    fields: dict[str, Setting] = {
        "local_batch_size": plan.sequences // max(plan.replicas, 1) if several else plan.parallel.microbatch,
        "global_batch_size": plan.sequences,
        "seq_len": plan.sequence_length,
        "steps": math.ceil(scenario.run.tokens / (plan.sequences * plan.sequence_length)),
    }
    if own == "disable_cuda_graphs":
        fields[own] = "all" not in plan.software.cuda_graphs or several
    fields |= {"dtype": "float32", "mixed_precision_param": "bfloat16"}
    return fields if own in fields else fields | {own: "float32"}


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


Table = dict[str, Setting | Sequence[str]]


def torchtitan_toml(scenario: Scenario) -> ConfigurationFile:
    """The job configuration of torchtitan 0.2.2 for a scenario's model, plan and run.

    Its first comments say what torchtitan cannot do. Raises InputError for a model or cluster that cannot be
    loaded, and for a fleet.
    """
    titan = titan_plan(scenario, WITH_TOML)
    plan, family, missing, moe = titan.plan, titan.family, titan.missing, titan.plan.shape.moe
    attention, mode = plan.shape.attention, recompute_mode(plan)
    # A model without a flavor names the package whose architecture is nearest.
    latent = attention is not None and attention.kind == "mla"
    nearest = "llama3" if moe is None else "deepseek_v3" if latent else "qwen3"
    split: Table = dict(parallelism(plan, titan.release))
    if moe is not None and plan.parallel.ep > 1:
        split["expert_tensor_parallel_degree"] = plan.parallel.expert_tp
        deepep = uses_deepep(plan, family, titan.release)
        split["expert_parallel_comm_backend"] = "deepep" if deepep else "standard"
    recomputed: Table = {"mode": "selective", "selective_ac_option": "op"}
    tables: dict[str, Table] = {
        "job": {"description": f"moesim plan of {scenario.name}"},
        "model": {"name": family or nearest, "flavor": titan.flavor or NO_FLAVOR},
        "optimizer": {"name": "AdamW", "implementation": "fused"},
        "training": {**_training(scenario, plan, "mixed_precision_reduce")},
        "parallelism": split,
        "checkpoint": {"enable": True},
        "activation_checkpoint": {"mode": mode} if mode in ("none", "full") else recomputed,
        "compile": {
            "enable": plan.software.kernels == "fused",
            "components": ["model", "loss"] if compiles_layers(plan) else ["loss"],
        },
    }
    if plan.recipe.linear == "fp8":
        gathers = plan.recipe.parameter_gather == "fp8"
        tables["model"]["converters"] = ["quantize.linear.float8"]
        tables["quantize.linear.float8"] = {
            "enable_fsdp_float8_all_gather": gathers,
            "precompute_float8_dynamic_scale_for_fsdp": gathers,
            "filter_fqns": ["output", "router.gate"],
        }
        if moe is not None:
            tables["model"]["converters"] = ["quantize.linear.float8", "quantize.grouped_mm.float8"]
            tables["quantize.grouped_mm.float8"] = {"fqns": ["experts"]}
    comments = "".join(f"# not spelled: {sentence}\n" for sentence in missing)
    body = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
    words = torchtitan_command("${PLAN_FILE}")
    return ConfigurationFile(f"torchtitan {WITH_TOML}", f"{HEADER}{comments}\n{body}", missing, words)


def _value(value: Setting | Sequence[str]) -> str:
    """A value in TOML; strings of JSON are basic strings of TOML, apart from the delete character."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {json.dumps(part)},\n" for part in value) + "]"
    return json.dumps(value).replace("\x7f", "\\u007f")


def torchtitan_command(config_file: str) -> tuple[str, ...]:
    """Words after `torchrun` that start torchtitan 0.2.2; the job file fills in the variables of paths."""
    return (
        *("-m", "torchtitan.train", f"--job.config_file={config_file}"),
        "--model.hf_assets_path=${TOKENIZER_MODEL}",
        "--training.dataset_path=${DATA_PATH}",
        "--checkpoint.folder=${CHECKPOINT_DIR}",
    )


def torchtitan_export(scenario: Scenario, version: str) -> ConfigurationFile:
    """The configuration of a release of torchtitan for a scenario's plan.

    Raises InputError for a model or cluster that cannot be loaded, and for a fleet.
    """
    if version == WITH_TOML:
        return torchtitan_toml(scenario)
    missing = titan_plan(scenario, version).missing
    return ConfigurationFile(f"torchtitan {version}", torchtitan_snippet(scenario), missing)
