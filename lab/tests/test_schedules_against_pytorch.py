"""Orders and CSV against PyTorch 2.13, wherever it is installed; DualPipe against its own repository."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from moesim.simulator.schedules import SCHEDULES, build, to_csv

pipelining: Any = pytest.importorskip(
    "torch.distributed.pipelining.schedules",
    reason="PyTorch (2.13) is not installed: pip install torch==2.13.0",
)

DIGESTS = Path(__file__).parents[2] / "tests" / "golden" / "schedules" / "digests.json"

CLASSES = {
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


def stages(pp: int, vpp: int) -> list[Any]:
    torch: Any = pytest.importorskip("torch")
    mocks = [MagicMock(group_size=pp, group_rank=0, num_stages=pp * vpp) for _ in range(vpp)]
    for index, mock in enumerate(mocks):
        mock.stage_index, mock.submod = index * pp, torch.nn.Identity()
    return mocks


def texts(order: dict[int, list[Any]]) -> list[list[str]]:
    rows = [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
    return [[cell for cell in row if "REDUCE_GRAD" not in cell] for row in rows]


@pytest.mark.parametrize("name", CLASSES)
def test_orders_and_legal_sizes_are_those_of_pytorch(name: str) -> None:
    from moesim.hwmodels.errors import InputError

    for pp in range(1, 9):
        for microbatches in [*range(1, 2 * pp + 4), 3 * pp, 4 * pp + 2, 40]:
            for vpp in (2,) if name in ("zbv", "dualpipev") else (1, 2, 3, 4):
                try:
                    theirs = CLASSES[name](stages(pp, vpp), microbatches)
                except ValueError:
                    with pytest.raises(InputError):
                        build(name, pp, microbatches, vpp)
                    continue
                ours = build(name, pp, microbatches, vpp)
                assert [list(map(str, steps)) for steps in ours.ranks] == texts(theirs.pipeline_order)


@pytest.mark.parametrize("name", CLASSES)
def test_digests_are_those_of_pytorch(name: str) -> None:
    orders = hashlib.sha256()
    for pp in range(2, 7):
        for microbatches in range(1, 25):
            for vpp in range(1, 4) if name.startswith("interleaved") else (1,):
                try:
                    theirs = CLASSES[name](
                        stages(pp, vpp if name.startswith("interleaved") else 2), microbatches
                    )
                except ValueError:
                    continue
                rows = "".join(",".join(row) + "\n" for row in texts(theirs.pipeline_order))
                orders.update(f"{pp} {microbatches} {vpp}\n{rows}".encode())
    assert orders.hexdigest() == json.loads(DIGESTS.read_text())[name]


@pytest.mark.parametrize(("name", "cls"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_textbook_schedules_against_the_listings(name: str, cls: str) -> None:
    for pp in range(2, 9):
        for microbatches in range(pp, 3 * pp):
            single = MagicMock(_num_stages=pp, _n_microbatches=microbatches)
            theirs = texts(getattr(pipelining, cls)._get_pipeline_order(single))
            ours = [list(map(str, steps)) for steps in build(name, pp, microbatches).ranks]
            # PyTorch's 1F1B listing begins the last rank at micro-batch 1.
            last = pp - 1 if name == "1f1b" else pp
            assert ours[:last] == theirs[:last]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "dualpipe"])
def test_pytorch_loads_our_csv(name: str, tmp_path: Path) -> None:
    vpp = 3 if name.startswith("interleaved") else 1
    schedule = build(name, 4, 8, vpp)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule))
    runtime = pipelining._PipelineScheduleRuntime(stages(4, schedule.vpp), 8)
    runtime._load_csv(str(path), format="compute_only")
    assert texts(runtime.pipeline_order) == [list(map(str, steps)) for steps in schedule.ranks]
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.routes[0]))
    assert runtime.pipeline_order_with_comms.keys() == set(range(4))  # sends and receives found their places


def test_pytorch_rejects_a_bidirectional_schedule(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(build("dualpipe", 4, 8)))
    with pytest.raises(AssertionError, match="assigned to both rank"):
        pipelining._PipelineScheduleRuntime(stages(4, 1), 8)._load_csv(str(path))


class Recorder:
    """Stands in for one rank of deepseek-ai/DualPipe and writes down the chunks that `step` asks for."""

    def __init__(self, cls: Any, pp: int, microbatches: int, rank: int, bidirectional: bool) -> None:
        self.log: list[str] = []
        self._deferred: list[str] = []
        self._next = {(d, kind): 0 for d in (0, 1) for kind in "FB"}
        self._swap = bidirectional and rank >= pp // 2
        self._stage = (rank, pp - 1 - rank if bidirectional else 2 * pp - 1 - rank)
        self._first = (0, microbatches // 2 if bidirectional else 0)
        model = MagicMock(
            rank=rank, num_ranks=pp, is_first_rank=rank == 0, is_last_rank=rank == pp - 1,
            is_in_second_half=self._swap, is_middle_rank=rank in (pp // 2 - 1, pp // 2),
            _forward_compute_chunk=lambda phase: self.log.append(self._chunk(phase, "F")),
            _backward_compute_chunk=self._backward,
            _forward_backward_compute_chunk=self._pair,
            _weight_chunk=lambda: self.log.append(self._deferred.pop(0)),
        )  # fmt: skip
        for method in ("_forward_chunk", "_backward_chunk", "_forward_backward_chunk"):
            setattr(model, method, getattr(cls, method).__get__(model))
        cls.step(model, num_chunks=microbatches, criterion=None if 0 < rank < pp - 1 else MagicMock())

    def _chunk(self, phase: int, kind: str) -> str:
        direction = phase ^ self._swap
        key = (direction, "F" if kind == "F" else "B")
        microbatch = self._first[direction] + self._next[key]
        self._next[key] += 1
        return f"{self._stage[direction]}{kind}{microbatch}"

    def _backward(self, phase: int, enable_zb: bool = False) -> None:
        self.log.append(self._chunk(phase, "I" if enable_zb else "B"))
        if enable_zb:
            self._deferred.append(self.log[-1].replace("I", "W"))

    def _pair(self, phase0: int, phase1: int) -> None:
        self.log.append(f"({self._chunk(phase0, 'F')};{self._chunk(phase1, 'B')})OVERLAP_F_B")


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_eight_steps_are_those_of_the_dualpipe_repository(name: str) -> None:
    module: Any = pytest.importorskip(f"dualpipe.{name}", reason="deepseek-ai/DualPipe is not installed")
    cls = module.DualPipe if name == "dualpipe" else module.DualPipeV
    by = 2 if name == "dualpipe" else 1
    for pp in range(by, 13, by):
        for microbatches in range(2 * pp, 2 * pp + 7 * by, by):
            ours = build(name, pp, microbatches)
            with (
                patch.object(module, "scatter", lambda *_: []),
                patch.object(module, "gather", lambda *_: []),
                patch.object(module.torch, "stack", lambda _: None),
                patch.object(module.comm, "TENSOR_SHAPES", [(1,)]),
                patch.object(module.comm, "TENSOR_DTYPE", module.torch.float32),
                patch.object(module, "WeightGradStore", MagicMock()),
            ):
                theirs = [Recorder(cls, pp, microbatches, rank, by == 2).log for rank in range(pp)]
            assert theirs == [list(map(str, steps)) for steps in ours.ranks]
