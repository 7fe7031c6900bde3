"""Chakra execution traces of an executed step: operators, collectives, sends, receives, and what each needs.

Nodes follow the public schema `et_def.proto` (mlcommons/chakra, Apache-2.0). Data dependencies hold all that
orders the execution, because Chakra's feeder looks at no other: what a task reads, what runs before it on its
stream, and the schedule's order. Those that are order only stand as control dependencies too. The schema
counts whole microseconds; `start_ns` and `duration_ns` hold the times exactly.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct, field

from moesim.simulator.engine.records import Execution, SendRecord
from moesim.simulator.predict.trace import FIRST_SEND
from moesim.simulator.trace.classes import CLASSES, COMMUNICATION
from moesim.simulator.trace.events import PHASES, Comm
from moesim.simulator.trace.predicted import RECEIVES, START_NS, gpu_places
from moesim.simulator.trace.read import RankTrace, StepTrace

if TYPE_CHECKING:
    from moesim.simulator.predict.step import ExecutedStep

COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
"""Node types of the schema."""
_COLLECTIVES = {
    "all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7, "ep_dispatch": 6,
    "ep_combine": 6, "ep_notify": 9, "other_communication": 0,
}  # fmt: skip
"""CollectiveCommType of each class; a barrier for what only synchronises."""


class _ChakraNode(Struct):
    name: str
    kind: int
    start: int
    end: int
    needs: list[_ChakraNode] = field(default_factory=list)
    follows: list[_ChakraNode] = field(default_factory=list)
    """What it stands behind by order only: on its stream, or in the schedule."""
    attributes: dict[str, int | str | bool] = field(default_factory=dict)
    number: int = -1


def chakra_files(step: ExecutedStep, trace: StepTrace, stem: str) -> dict[str, bytes]:
    """`STEM.RANK.et` of every rank of a predicted trace, and `comm_groups.cfg`: ranks of each `pg_name`.

    Times in nanoseconds from the start of the trace, where the step begins at `predicted.START_NS`.
    """
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    files = {}
    places = gpu_places(step, [rank.raw.rank for rank in trace.ranks])
    for rank, (gpu, execution, info, row, member) in zip(trace.ranks, places, strict=True):
        gpus = [stage[member] for stage in info.gpus]
        if gpus[row] != gpu:  # shown as another GPU of its pipeline rank: its pipeline is its own
            gpus = list(step.prepared.layout.pp_group(gpu))
        nodes = _Builder(execution, rank, row, member, gpus, groups).nodes()
        files[f"{stem}.{gpu}.et"] = _encoded(nodes, trace.source, rank.raw.world)
    listed = {str(number): list(ranks) for (_, ranks), number in groups.items()}
    files["comm_groups.cfg"] = (json.dumps(listed) + "\n").encode()
    return files


class _Builder:
    """The nodes of one GPU and what each needs."""

    def __init__(
        self, execution: Execution, rank: RankTrace, row: int, member: int, gpus: Sequence[int],
        groups: dict[tuple[str, tuple[int, ...]], int],
    ) -> None:  # fmt: skip
        self.execution, self.rank, self.row, self.member = execution, rank, row, member
        self.gpus, self.groups = gpus, groups
        self.table = execution.table
        self.by_task: defaultdict[int, list[_ChakraNode]] = defaultdict(list)
        self.ends: list[_ChakraNode] = []
        """The end of the step, in order."""

    def nodes(self) -> list[_ChakraNode]:
        """All nodes in an order in which each stands behind what it needs."""
        self._events()
        first, last = self.table.first_action[self.row : self.row + 2].tolist()
        actions = {
            self._key(action, side): action for action in range(len(self.table.steps)) for side in (0, 1)
        }
        received: defaultdict[int, list[_ChakraNode]] = defaultdict(list)
        sent: defaultdict[int, list[tuple[_ChakraNode, int]]] = defaultdict(list)
        for send in self.execution.sends:
            side = 0 if "F" in send.label else 1
            stage, micro = map(int, send.label.split("FB"[side]))
            maker = actions[side, stage, micro]
            if send.target == self.row:
                taker = actions[side, stage + (1, -1)[side], micro]
                received[taker].append(self._transfer(send, RECV, maker))
            if send.source == self.row:
                sent[maker].append((self._transfer(send, SEND, maker), side))
        before: list[_ChakraNode] = []
        awaits = self.execution.program.schedule.awaits(self.row)
        for action, held in zip(range(first, last), awaits, strict=True):
            before = self._action(action, before, received[action], sent[action])
            if held:  # the rank waits for its own sends
                before += [node for node, _ in sent[action]]
        for node in self.ends:
            node.follows, before = before, [node]
        found = [node for nodes in self.by_task.values() for node in nodes] + self.ends
        found += [node for nodes in received.values() for node in nodes]
        found += [node for nodes in sent.values() for node, _ in nodes]
        return _ordered(found)

    def _key(self, action: int, side: int) -> tuple[int, int, int]:
        """(side, stage, micro-batch); actions that only add weight gradients take and send nothing."""
        stage = int(self.table.stages[action, side])
        if stage < 0 or (side == 1 and self.table.steps[action].code.kind == "W"):
            return side, -1 - action, -1
        return side, stage, int(self.table.microbatches[action, side])

    def _events(self) -> None:
        events, names = self.rank.events, self.rank.names
        columns = ("start", "end", "stream", "cls", "name", "comm", "shape", "phase", "correlation")
        for start, end, stream, cls, name, comm, shape, phase, task in zip(
            *(events[column].tolist() for column in columns), strict=True
        ):
            if stream == RECEIVES or stream >= FIRST_SEND:
                continue
            kind = CLASSES[cls]
            node = _ChakraNode(f"moesim::{kind}::{names[name]}", COMP, start, end)
            node.attributes = {"is_cpu_op": False, "tid": stream, "phase": PHASES[phase]}
            if kind in COMMUNICATION:
                node.kind = COLLECTIVE
                node.attributes |= self._collective(kind, self.rank.raw.comms[comm])
            elif shape >= 0:
                m, n, k = map(int, names[shape].split("x"))
                node.attributes |= {"num_ops": 2 * m * n * k, "tensor_size": m * k + k * n + m * n}
            (self.by_task[task] if task >= 0 else self.ends).append(node)

    def _collective(self, kind: str, comm: Comm) -> dict[str, int | str | bool]:
        said: dict[str, int | str | bool] = {
            "comm_type": _COLLECTIVES[kind], "comm_size": max(comm.bytes_in, 0),
            "pg_desc": comm.group, "pg_size": comm.size,
        }  # fmt: skip
        if comm.ranks:
            number = self.groups.setdefault((comm.group, comm.ranks), len(self.groups))
            said["pg_name"] = str(number)
        return said

    def _transfer(self, send: SendRecord, kind: int, maker: int) -> _ChakraNode:
        """A send, or the receive of the same, of this member: from when its own output was there."""
        word, side = "send" if kind == SEND else "receive", int("B" in send.label)
        times, code, member = self.execution.times, self.table.steps[maker].code, self.member
        out = code.backward_out if side else code.forward_out
        ready = times.end[maker] if out is None else times.ends[self.table.first_task[maker] + out]
        length = send.end - send.start
        slow = self.execution.program.link_map.send_slowness(send.source, send.target)
        if not isinstance(slow, float):  # each member's send ends with its own NICs
            length = round(float(slow[member]) * (length / float(slow.max())))
        start = int(ready[member]) + START_NS
        end = start + length
        node = _ChakraNode(f"moesim::send_recv::{word} {send.label}", kind, start, end)
        stage, micro = map(int, send.label.split("FB"[side]))
        tag = 2 * (stage * self.execution.program.schedule.microbatches + micro) + side
        node.attributes = {
            "is_cpu_op": False, "tid": FIRST_SEND, "comm_tag": tag,
            "comm_size": round(self.execution.program.costs.send_bytes),
            "comm_src": self.gpus[send.source], "comm_dst": self.gpus[send.target],
        }  # fmt: skip
        return node

    def _action(
        self,
        action: int,
        before: list[_ChakraNode],
        received: list[_ChakraNode],
        sent: list[tuple[_ChakraNode, int]],
    ) -> list[_ChakraNode]:
        """Link the tasks of an action; return what the next action stands behind."""
        code, first = self.table.steps[action].code, int(self.table.first_task[action])
        outs: list[list[_ChakraNode]] = []
        used: set[int] = set()
        for number, task in enumerate(code.tasks):
            previous = code.before[number]
            follows = [] if previous is None else outs[previous]
            needs = [node for need in task.deps for node in outs[need]]
            used |= {*task.deps, *([] if previous is None else [previous])}
            if not task.deps and previous is None:
                follows, needs = before, received
            nodes = self.by_task.get(first + number, [])
            for node, one in zip(nodes, [None, *nodes], strict=False):
                node.needs, node.follows = (needs, follows) if one is None else ([one], [])
            # A task without time stands for what it needs.
            outs.append(nodes[-1:] or list({id(node): node for node in (*needs, *follows)}.values()))
        tails = [node for number, out in enumerate(outs) if number not in used for node in out]
        after = {id(node): node for node in tails or [*before, *received]}
        for node, side in sent:
            out = code.forward_out if side == 0 else code.backward_out
            node.needs = outs[out] if out is not None else list(after.values())
        return list(after.values())


def _ordered(nodes: list[_ChakraNode]) -> list[_ChakraNode]:
    """Nodes in order of time, each behind what it needs; numbers them from 0."""
    order: list[_ChakraNode] = []
    seen: dict[int, bool] = {}
    for root in sorted(nodes, key=lambda node: (node.start, node.end)):
        stack = [root]
        while stack:
            node = stack[-1]
            open_needs = [need for need in (*node.needs, *node.follows) if id(need) not in seen]
            if open_needs:
                stack += open_needs
                continue
            stack.pop()
            if id(node) not in seen:
                seen[id(node)], node.number = True, len(order)
                order.append(node)
    return order


# -- the wire format of protobuf -----------------------------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _whole(key: int, value: int) -> bytes:
    return _varint(key << 3) + _varint(value) if value else b""


def _bytes(key: int, value: bytes) -> bytes:
    return _varint(key << 3 | 2) + _varint(len(value)) + value


_KEY = {"comm_src": 7, "comm_dst": 7, "comm_tag": 7, "tensor_size": 13}
"""Fields of `AttributeProto` by name, as the feeder reads them: int32, uint64; others int64."""


@lru_cache(1 << 16)
def _attribute(name: str, value: int | str | bool) -> bytes:
    if isinstance(value, bool):
        said = _varint(27 << 3) + _varint(int(value))
    elif isinstance(value, int):
        said = _varint(_KEY.get(name, 9) << 3) + _varint(value)
    else:
        said = _bytes(29, value.encode())
    return _bytes(10, _bytes(1, name.encode()) + said)


def _encoded(nodes: Iterable[_ChakraNode], name: str, world: int) -> bytes:
    head = _bytes(1, b"0.0.4")
    for key, value in (("name", name), ("world_size", world), ("by", "moesim")):
        head += b"\x12" + _attribute(key, value)[1:]  # the same message under key 2
    parts = [_varint(len(head)), head]
    for node in nodes:
        order = sorted({need.number for need in node.follows})
        needs = sorted({need.number for need in node.needs} | set(order))
        begin, end = round(node.start / 1000), round(node.end / 1000)
        text = b"".join([
            _whole(1, node.number), _bytes(2, node.name.encode()), _whole(3, node.kind),
            _bytes(4, b"".join(map(_varint, order))) if order else b"",
            _bytes(5, b"".join(map(_varint, needs))) if needs else b"",
            _whole(6, begin), _whole(7, end - begin),
            *(_attribute(key, value) for key, value in node.attributes.items()),
            _attribute.__wrapped__("start_ns", node.start), _attribute("duration_ns", node.end - node.start),
        ])  # fmt: skip
        parts += [_varint(len(text)), text]
    return b"".join(parts)
