"""What Megatron core asks of a GPU, replaced for a dry run of host_megatron.py on a CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def imitate_gpu_on_cpu() -> None:
    """Replace what Megatron core asks of a GPU, for a dry run."""

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if "device" in kwargs and "cpu" not in str(kwargs["device"]):
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    class Stream:
        def wait_stream(self, *_: Any) -> None:
            """Nothing runs beside."""

        def record_event(self) -> Stream:
            """Nothing to wait for."""
            return self

        def synchronize(self) -> None:
            """Nothing to wait for."""

    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.Stream, cuda.stream = Stream, nothing
    cuda.current_stream = cuda.default_stream = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.random.get_rng_state = cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._set_cuda_rng_state = lambda *_, **__: None
    random.CudaRNGStatesTracker.fork = nothing
    kind_of = torch.Tensor.type
    torch.Tensor.type = lambda self, *a: (
        kind_of(self, *a) if a else f"torch.cuda.{kind_of(self).split('.')[-1]}"
    )
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, record_stream=False: (
        x.numpy() if as_numpy and isinstance(x, torch.Tensor) else x
    )
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda *_: None
    OnCpu().__enter__()
    sys.stderr.write("dry run on a CPU\n")
