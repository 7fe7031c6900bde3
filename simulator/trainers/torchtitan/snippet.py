"""Writes a plan as a configuration function of torchtitan 0.3.0, whose configurations are Python."""

from __future__ import annotations

import json

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.facts import PlanFacts
from moesim.simulator.trainers.torchtitan.releases import NEWEST, release_of
from moesim.simulator.trainers.torchtitan.rules import recompute_mode
from moesim.simulator.trainers.torchtitan.settings import (
    Setting,
    compiles_layers,
    local_batch,
    parallelism,
    training_steps,
    uses_deepep,
)
from moesim.simulator.trainers.torchtitan.subject import titan_plan

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
