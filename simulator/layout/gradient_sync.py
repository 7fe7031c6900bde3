"""When gradients are reduced over the replicas, and in which form they wait for that (eq. X32).

One question decides the memory of gradients, the bytes on the links and the end of the step: does a GPU keep
the sums of all its gradients until the last micro-batch, or only those of its shard, which takes a
reduce-scatter in every backward? Engine, closed form, bounds and memory all ask `GradientSync`.

What frameworks do (the table is in docs/model/05-transfers.md):

- Megatron core's distributed optimizer starts its reduction on the last micro-batch only
  (NVIDIA/Megatron-LM@core_v0.14.0 `megatron/core/distributed/param_and_grad_buffer.py`,
  `register_grad_ready`). Megatron-FSDP with `optim_grads` or `optim_grads_params` scatters in every
  backward, and reduces over its outer groups on the last one
  (`fsdp/src/megatron_fsdp/experimental/fully_shard.py`, `microbatch`; NVIDIA/Megatron-LM#7186, 2026-09-12).
- FSDP2 reduces in every backward, all-reduces HSDP's groups then too, and waits for both before the backward
  returns; `set_requires_gradient_sync(False)` keeps whole gradients instead (torch 2.11
  `distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `post_backward`, `finalize_backward`). torch's
  pipelines switch the reductions off up to the end of the step (`distributed/pipelining/stage.py`).
- DeepSpeed's ZeRO-2 reduces every bucket to its owner in every backward (deepspeedai/DeepSpeed@02aa38c3a551
  `deepspeed/runtime/zero/stage_1_and_2.py`, `reduce_independent_p_g_buckets_and_remove_grads`); its
  pipeline engine refuses ZeRO-2 and 3 (`deepspeed/runtime/pipe/engine.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from moesim.hwmodels.errors import InputError
from moesim.simulator.frameworks.software import Software
from moesim.simulator.scenario.parallel import ParallelPlan


class GradientSync(NamedTuple):
    """When the gradients of a plan are reduced over its replicas."""

    in_backward: bool
    """Every backward of a block reduce-scatters its gradients; GPUs keep the sums of their shards."""
    hidden: bool
    """Collectives inside the step run beside the compute of other blocks; else compute waits for them."""
    groups_in_backward: bool
    """Every backward also all-reduces the shards over the groups of hybrid FSDP (HSDP)."""
    inside_step: bool
    """Collectives over the replicas run inside the step, so that replicas meet there."""

    @classmethod
    def of(cls, plan: ParallelPlan, software: Software, microbatches: int) -> GradientSync:
        """The rule for a plan, its software and the number of micro-batches of a pipeline.

        With one micro-batch nothing accumulates, so ZeRO-2 reduces once, as ZeRO-1 does. Hybrid FSDP with
        optimizer states over all GPUs is Megatron-FSDP's, which reduces over the groups on the last
        micro-batch; with states over each group it is HSDP, which does so in every backward.
        """
        accumulates = microbatches > 1 or plan.zero_stage == 3
        in_backward = plan.zero_stage >= 2 and accumulates and not software.keeps_whole_gradients(plan.pp)
        return cls(
            in_backward,
            software.hides_zero_3 if plan.zero_stage == 3 else software.overlap_data_parallel,
            in_backward and plan.shard_group is not None and not plan.shard_optimizer_over_groups,
            in_backward or plan.zero_stage == 3,
        )


def check_gradient_sync(plan: ParallelPlan, software: Software) -> None:
    """Raise InputError where switches of sharding contradict the ZeRO stage or the framework."""
    if software.parameter_gathers != "block" and plan.zero_stage != 3:
        raise InputError(
            f"software.parameter_gathers={software.parameter_gathers} with "
            f"parallel.zero_stage={plan.zero_stage}: only ZeRO-3 gathers parameters inside the "
            "step; leave the key out or use zero_stage 3",
            key="software.parameter_gathers",
            nearest=("block",),
        )
    chosen, key = software.gradient_sync, "software.gradient_sync"
    if chosen is None:
        return
    if plan.zero_stage < 2:
        raise InputError(
            f"{key}={chosen} with parallel.zero_stage={plan.zero_stage}: stages 0 and 1 keep whole gradients "
            "and reduce them once, after the last micro-batch; leave the key out, or use zero_stage 2 or 3",
            key=key,
            nearest=(None,),
        )
    if chosen == "every-microbatch" and plan.pp > 1 and software.parameters_copied:
        raise InputError(
            f"{key}={chosen} with parallel.pp={plan.pp} and software.parameters_copied=true: torch's "
            "pipelines switch FSDP2's reductions off up to the last micro-batch; leave the key out or use "
            "last-microbatch",
            key=key,
            nearest=("last-microbatch",),
        )
