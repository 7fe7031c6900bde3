"""Host time of DTensor's operations under tensor parallelism of two, and how many of them a block runs.

    torchrun --standalone --nproc-per-node 2 -m lab.studies.dtensor_calls --out DIR --budget 80

`parts` holds, for each operation, the host time of a call with and without DTensor, forward and backward, in
a row of calls that wait for nothing; `calls` the operations with a DTensor among their arguments in one block
of torchtitan, by name; `blocks` the host time of whole blocks, three times. Tensors are tiny, so that the
device never limits. `--dry` runs every path on a CPU.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from msgspec.structs import replace
from functools import partial
from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare()
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.studies import host_blocks_models as models
from lab.studies.host_blocks import describe
from lab.studies.host_blocks_models import TOKENS, VOCABULARY, BlockCase
from lab.studies.host_blocks_study import Study, block, conduct

WIDTH, CALLS = 256, 40


def host_us(study: Study, call: Callable[[], Any]) -> float:
    """Host time of one of many calls, the least of five rows, because other work only adds."""
    found = []
    for _ in range(2 if study.dry else 5):
        study.synchronise()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - began) / CALLS * 1e6)
        study.synchronise()
    return min(found)


def operations(mesh: Any, device: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]]:
    """(function, arguments with DTensor, the same without) by name."""
    length, f = TOKENS["tiny"], torch.nn.functional

    def leaf(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=kind, requires_grad=True)

    def spread(x: torch.Tensor, placement: Any) -> Any:
        return DTensor.from_local(x.detach(), mesh, [placement], run_check=False).requires_grad_()

    half = length // 2
    x, part, weight = leaf(1, length, WIDTH), leaf(1, half, WIDTH), leaf(WIDTH // 2, WIDTH)
    gain, heads = leaf(WIDTH), leaf(1, length, 2, 64)
    turned = leaf(1, length, 2, 64, kind=torch.float32)
    whole, sharded, column = spread(x, Replicate()), spread(part, Shard(1)), spread(weight, Shard(0))
    of_heads, of_turned = spread(heads, Shard(2)), spread(turned, Shard(2))
    unsummed = spread(x, Partial())
    copied = spread(gain, Replicate())

    def plain(function: Callable[..., Any], with_dtensor: tuple[Any, ...], without: tuple[Any, ...]) -> Any:
        return function, with_dtensor, without

    return {
        "from_local": plain(lambda y: DTensor.from_local(y, mesh, [Shard(1)], run_check=False), (part,), ()),
        "to_local": plain(lambda y: y.to_local(), (sharded,), ()),
        "all-gather": plain(lambda y: y.redistribute(mesh, [Replicate()]), (sharded,), ()),
        "reduce-scatter": plain(lambda y: y.redistribute(mesh, [Shard(1)]), (unsummed,), ()),
        "linear": plain(f.linear, (whole, column), (x, weight)),
        "view": plain(lambda y: y.view(1, length, -1, 64), (whole,), (x,)),
        "transpose": plain(lambda y: y.transpose(1, 2), (of_heads,), (heads,)),
        "add": plain(lambda a, b: a + b, (sharded, sharded), (part, part)),
        "multiply": plain(lambda a, b: a * b, (of_heads, of_heads), (heads, heads)),
        "cast": plain(lambda y: y.float(), (of_heads,), (heads,)),
        "silu": plain(f.silu, (sharded,), (part,)),
        "rms_norm": plain(lambda y, g: f.rms_norm(y, (WIDTH,), g), (sharded, copied), (part, gain)),
        "view_as_complex": plain(
            lambda y: torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2)), (of_turned,), (turned,)
        ),
    }  # fmt: skip


def priced(study: Study, call: Any, arguments: tuple[Any, ...]) -> dict[str, float]:
    """Host time of forward and backward of one operation."""
    y = call(*arguments)
    seed = torch.ones_like(y)
    wanted = [leaf for leaf in arguments if leaf.requires_grad]
    forward = host_us(study, lambda: call(*arguments))
    backward = host_us(study, lambda: torch.autograd.grad(y, wanted, seed, retain_graph=True))
    return {"forward_us": forward, "backward_us": backward}


def one(study: Study, name: str) -> dict[str, Any]:
    """An operation with and without DTensor."""
    call, arguments, without = operations(models.meshes(study.device, 1)["world"], study.device)[name]
    out: dict[str, Any] = {"dtensor": priced(study, call, arguments)}
    if without:
        out["plain"] = priced(study, call, without)
    return out


class Counted(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations that have a DTensor among their arguments."""

    def __init__(self) -> None:
        """Start at none."""
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run."""
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self.found[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def calls(study: Study, case: BlockCase) -> dict[str, Any]:
    """Operations on DTensors of one block by pass: the difference between two depths."""
    found: dict[int, dict[str, Counter[str]]] = {}
    for layers in (1, 2):
        model = models.build(replace(case, layers=layers), study.device)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS[case.size]), device=study.device)
        with Counted() as forward:
            y = model(tokens)
        with Counted() as backward:
            y.backward(torch.ones_like(y))
        found[layers] = {"forward": forward.found, "backward": backward.found}
    return {
        name: {key: n - found[1][name][key] for key, n in found[2][name].items() if n > found[1][name][key]}
        for name in ("forward", "backward")
    }


def run_all(study: Study) -> None:
    """All cases, the most wanted first; whole blocks by turns, so that a slow minute is seen."""
    mesh = models.meshes(study.device, 1)["world"]
    plain, split = BlockCase("llama3", 0), BlockCase("llama3", 0, tp=2)
    for name in operations(mesh, study.device):
        study.run("parts", name, partial(one, study, name))
    for case in (split, BlockCase("qwen3", 0, tp=2)):
        study.run("parts", f"calls {case.name}", partial(calls, study, case))
    for turn in ("", " again", " once more"):
        for case in (plain, split, replace(plain, compile=True), replace(split, compile=True)):
            study.run("blocks", case.name + turn, partial(block, study, case), 6.0)
    study.run("blocks", "qwen3 tp2", partial(block, study, BlockCase("qwen3", 0, tp=2)), 6.0)
    for name in operations(mesh, study.device):
        study.run("parts", f"{name} again", partial(one, study, name))


def short(row: dict[str, Any]) -> Any:
    """A block's two medians, or what became of it."""
    return {k: round(v) for k, v in row.items() if k.endswith("ward_us")} or str(row)[-300:]


def main() -> None:
    """Measure and write the results."""
    warnings.simplefilter("ignore")
    options = study_setup.parser(80.0).parse_args()
    rank, world = models.start_group("cpu" if options.dry else "cuda")
    study = Study(options, "dtensor_calls.json", rank)
    describe(study, world)
    if options.dry:
        models.imitate_gpu_on_cpu()
    conduct(study, run_all, short)


if __name__ == "__main__":
    main()
