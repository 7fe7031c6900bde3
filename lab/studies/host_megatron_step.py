"""Parts of host_megatron.py around the layers: gradient hooks, schedule, optimizer."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.moe import moe_utils

from lab.studies import host_megatron_models as models
from lab.studies.host_blocks_study import Study, spread, wall
from lab.studies.host_megatron_models import BF, HIDDEN, TOKENS, MegatronCase
from lab.studies.host_megatron_parts import guarded, repeats


def wrapped(study: Study, case: MegatronCase, **options: Any) -> Any:
    """A model of a case in Megatron core's gradient buckets."""
    model = models.build(case, study.device)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
    return DistributedDataParallel(model.config, config, model)


def model_times(study: Study, model: Any, context: Any, added: bool, finish: bool) -> dict[str, Any]:
    """Host time of a model's forward and backward inside a context; `added`: gradients are in the buckets."""
    forward, backward, last, zero = [], [], [], []
    inputs = models.inputs(study.device)
    buckets = hasattr(model, "zero_grad_buffer")
    gc.collect()
    gc.disable()
    try:
        for i in range(repeats(study) + 3):
            study.synchronise()
            t = [time.perf_counter()]
            if buckets:
                model.zero_grad_buffer()
            t.append(time.perf_counter())
            for parameter in model.parameters():
                parameter.grad = None
                if added:
                    parameter.grad_added_to_main_grad = True
            with context():
                study.synchronise()
                t.append(time.perf_counter())
                loss = model(**inputs).mean()
                t.append(time.perf_counter())
                study.synchronise()
                t.append(time.perf_counter())
                loss.backward()
                t.append(time.perf_counter())
            study.synchronise()
            t.append(time.perf_counter())
            if finish:
                model.finish_grad_sync()
            t.append(time.perf_counter())
            if i >= 3:
                zero.append(t[1] - t[0])
                forward.append(t[3] - t[2])
                backward.append(t[5] - t[4])
                last.append(t[7] - t[6])
    finally:
        gc.enable()
    names = ("zero gradients", "forward", "backward", "finish")
    return {n: spread(v) for n, v in zip(names, (zero, forward, backward, last), strict=True)} | {
        "parameters": len(list(model.parameters()))
    }


def gradient_hooks(study: Study) -> dict[str, Any]:
    """Models without and with Megatron core's gradient buckets, on the last micro-batch and earlier."""
    case = MegatronCase(2 if study.dry else 8)
    bare = models.build(case, study.device)
    out: dict[str, Any] = {"bare": guarded(lambda: model_times(study, bare, nullcontext, False, False))}
    for sharded in (False, True):
        options = {"overlap_grad_reduce": True, "use_distributed_optimizer": sharded}

        def measure(
            options: dict[str, Any] = options, early: bool = False, added: bool = True, gather: bool = False
        ) -> dict[str, Any]:
            model = wrapped(study, case, overlap_param_gather=gather, **options)
            if gather:
                model.start_param_sync()
            return model_times(study, model, model.no_sync if early else nullcontext, added, not early)

        name = "distributed optimizer" if sharded else "all-reduce"
        out[f"{name}, earlier micro-batch"] = guarded(partial(measure, early=True))
        out[f"{name}, last micro-batch"] = guarded(measure)
        out[f"{name}, earlier micro-batch, added by the hook"] = guarded(
            partial(measure, early=True, added=False)
        )
    out["parameter gather, earlier micro-batch"] = guarded(partial(measure, early=True, gather=True))
    return out


class Tiny(torch.nn.Module):  # type: ignore[misc]
    """One product, with what the schedule asks of a model."""

    def __init__(self, config: Any, device: str) -> None:
        """Make the weight."""
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=BF, device=device))

    def set_input_tensor(self, _: Any) -> None:
        """No pipeline: nothing comes from another stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x @ self.weight


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A loss by token, the number of tokens, and the report, as Megatron-LM's own function gives them."""
    loss = output.float().sum().view(1)
    count = torch.tensor(output.shape[0], dtype=torch.int, device=output.device)
    return loss, count, {"lm loss": torch.cat([loss.detach(), count.view(1)])}


def schedule(study: Study) -> dict[str, Any]:
    """Host time of the schedule for a micro-batch of a tiny model, and of that model without the schedule."""
    few, many = 4, 16
    out: dict[str, Any] = {"micro-batches": (few, many)}
    run = get_forward_backward_func()
    for name, case in (("dense", MegatronCase(1)), ("routed", MegatronCase(1, experts=8, aux="aux_loss"))):
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
        model = Tiny(models.configuration(case, study.device), study.device)
        x = torch.randn(TOKENS, HIDDEN, dtype=BF, device=study.device)

        def step(data: Any, model: Any) -> Any:
            return model(next(data)), loss_of

        def steps(count: int, model: Any = model, x: Any = x) -> None:
            run(
                forward_step_func=step,
                data_iterator=itertools.repeat(x),
                model=model,
                num_microbatches=count,
                seq_length=TOKENS,
                micro_batch_size=1,
            )

        def direct(count: int, model: Any = model, x: Any = x) -> None:
            for _ in range(count):
                loss_of(model(x))[0].backward()

        for kind, call in (("schedule", steps), ("direct", direct)):
            medians = {n: wall(study, partial(call, n))["us"] for n in (few, many)}
            out[f"{name}, {kind}, micro-batch_us"] = (medians[many] - medians[few]) / (many - few)
            out[f"{name}, {kind}, once_us"] = medians[few] - few * out[f"{name}, {kind}, micro-batch_us"]
    return out


def optimizer(study: Study) -> dict[str, Any]:
    """Host time of the distributed optimizer's step by part, of clearing and finishing, for two depths."""
    out: dict[str, Any] = {}
    for layers in (1, 2) if study.dry else (4, 16):
        model = wrapped(study, MegatronCase(layers), overlap_grad_reduce=True, use_distributed_optimizer=True)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-6,
            bf16=True,
            params_dtype=BF,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        )
        adam = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
        for parameter in model.parameters():
            parameter.grad_added_to_main_grad = True
        model(**models.inputs(study.device)).mean().backward()
        model.finish_grad_sync()
        calls: dict[str, Callable[[], Any]] = {
            "step": adam.step,
            "prepare": adam.prepare_grads,
            "norm": adam.get_grad_norm,
            "step after clipping": adam.step_with_ready_grads,
            "zero": adam.zero_grad,
            "zero buckets": model.zero_grad_buffer,
        }
        row: dict[str, Any] = {"parameters": len(list(model.parameters()))}
        for name, call in calls.items():
            row[name] = guarded(partial(wall, study, call))
        out[f"{layers} layers"] = row
    return out
