"""Writes a plan as a torchtitan configuration snippet, and lists the parts that have no field."""

from __future__ import annotations

from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES


def torchtitan_snippet(scenario: Scenario) -> str:
    """Python lines that set a `Trainer.Config` to the plan, below comments on what has no field.

    Field names: pytorch/torchtitan@0014ac2ca45a `torchtitan/config/configs.py`. Raises InputError for a
    model that cannot be loaded.
    """
    shape = scenario.shape
    plan, batch = scenario.parallel, scenario.batch
    replicas = scenario.machine.n_gpus // (plan.tp * plan.cp * plan.pp)
    sharded = plan.zero_stage > 0
    fields: list[tuple[str, str]] = [
        ("data_parallel_replicate_degree", str(1 if sharded else replicas)),
        ("data_parallel_shard_degree", str(replicas if sharded else 1)),
        ("tensor_parallel_degree", str(plan.tp)),
        ("enable_sequence_parallel", str(plan.sequence_parallel)),
        ("context_parallel_degree", str(plan.cp)),
        ("expert_parallel_degree", str(plan.ep)),
        ("pipeline_parallel_degree", str(plan.pp)),
        ("fsdp_reshard_after_forward", '"always"' if plan.zero_stage == 3 else '"never"'),
    ]
    missing = _unspelled(scenario, shape)
    order = _torch_name(scenario)
    if plan.pp > 1 and order is not None:
        fields.append(("pipeline_parallel_schedule", f'"{order}"'))
        fields.append(("pipeline_parallel_microbatch_size", str(plan.microbatch)))
        if scenario.stages.layers is not None:
            fields.append(("module_fqns_per_model_part", _parts(scenario.stages.layers)))
    local = batch.sequences // replicas if plan.pp > 1 else plan.microbatch
    modes = {"none": "none", "full": "full"}
    lines = [f"# not spelled: {sentence}" for sentence in missing]
    lines.append("config.parallelism = ParallelismConfig(")
    lines += [f"    {name}={value}," for name, value in fields]
    lines.append(")")
    lines.append(f"config.training.local_batch_size = {local}")
    lines.append(f"config.training.global_batch_size = {batch.sequences}")
    lines.append(f"config.training.seq_len = {batch.sequence_length}")
    lines.append(
        f'config.activation_checkpoint.mode = "{modes.get(recompute_label(scenario.recompute), "selective")}"'
    )
    return "\n".join(lines) + "\n"


def _torch_name(scenario: Scenario) -> str | None:
    """The schedule's name in torch.distributed.pipelining (2.13)."""
    spec = SCHEDULES.get(scenario.schedule)
    return None if spec is None else spec.names_elsewhere.get("torch")


def _parts(layers: tuple[int, ...]) -> str:
    """Modules of every stage, with the embedding on the first and norm and output on the last."""
    parts, start = [], 0
    for number, count in enumerate(layers):
        names = [f"layers.{n}" for n in range(start, start + count)]
        start += count
        if number == 0:
            names.insert(0, "tok_embeddings")
        if number == len(layers) - 1:
            names += ["norm", "output"]
        parts.append("[" + ", ".join(f'"{name}"' for name in names) + "]")
    return "[\n        " + ",\n        ".join(parts) + ",\n    ]"


def _unspelled(scenario: Scenario, shape: ModelShape) -> list[str]:
    plan, found = scenario.parallel, []
    if plan.pp > 1 and _torch_name(scenario) is None:
        found.append(f"schedule {scenario.schedule}: torch.distributed.pipelining has none of this name")
    if plan.zero_stage in (1, 2):
        found.append(
            f"ZeRO stage {plan.zero_stage}: FSDP shards parameters as well; kept gathered, it is nearest"
        )
    if plan.expert_tp > 1:
        found.append(f"expert tensor parallelism of {plan.expert_tp}: there is no such degree any more")
    if scenario.recipe.linear == "fp8":
        found.append("FP8 GEMMs: a model converter of the model's own configuration, not a field")
    if plan.ep > 1:
        found.append(
            f"{scenario.communication.sms} communication SMs: the library of the token dispatcher sets them"
        )
    if shape.mtp_layers:
        found.append("MTP modules: torchtitan's model has none")
    if not isinstance(scenario.recompute, str):
        found.append(f"recompute={recompute_label(scenario.recompute)}: torchtitan has no list of modules")
    if scenario.recompute == "deepseek-v3":
        found.append("attention output kept in 12 bits (E5M6), a part of recompute=deepseek-v3")
    if scenario.routing.eplb is not None:
        found.append("placement of experts and their replicas: torchtitan trains with experts in order")
    return found
