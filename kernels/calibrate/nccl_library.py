"""Calls NCCL of PyTorch or the system through its C interface, with all ranks in one process."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesim.kernels.calibrate.protocol import TaskFailed

_INT8, _BF16 = 0, 9  # ncclDataType_t
_SUM = 0


def find_library() -> str:
    """Path or name of libnccl.so.2, from the package nvidia-nccl or else the system; empty without one."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        path = Path(place) / "nccl" / "lib" / "libnccl.so.2"
        if path.is_file():
            return str(path)
    return ctypes.util.find_library("nccl") or ""


class Communicator:
    """A communicator with one rank per device. Buffers are device addresses; sizes are in bytes."""

    def __init__(self, devices: Sequence[int]) -> None:
        """Start NCCL; raises TaskFailed where it does not start."""
        try:
            self._library = ctypes.CDLL(find_library(), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise TaskFailed(f"NCCL cannot be loaded: {error}") from None
        self.ranks = len(devices)
        self._comms = (ctypes.c_void_p * self.ranks)()
        self._call("ncclCommInitAll", self._comms, self.ranks, (ctypes.c_int * self.ranks)(*devices))

    @property
    def version(self) -> str:
        """The version of NCCL, such as "2.28.7"."""
        code = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(code))
        return f"{code.value // 10000}.{code.value % 10000 // 100}.{code.value % 100}"

    def run(
        self,
        operation: str,
        send: Sequence[int],
        receive: Sequence[int],
        size_bytes: int,
        streams: Sequence[int],
    ) -> None:
        """Queue one collective; one rank contributes `size_bytes` (for all_reduce its whole buffer)."""
        part = size_bytes // self.ranks // 2 * 2
        self._call("ncclGroupStart")
        for rank in range(self.ranks):
            a, b = ctypes.c_void_p(send[rank]), ctypes.c_void_p(receive[rank])
            tail = (self._comm(rank), ctypes.c_void_p(streams[rank]))
            if operation == "all_reduce":
                self._call("ncclAllReduce", a, b, _size(size_bytes // 2), _BF16, _SUM, *tail)
            elif operation == "all_gather":
                self._call("ncclAllGather", a, b, _size(size_bytes // 2), _BF16, *tail)
            elif operation == "reduce_scatter":
                self._call("ncclReduceScatter", a, b, _size(part // 2), _BF16, _SUM, *tail)
            else:
                for peer in range(self.ranks):
                    there = ctypes.c_void_p(send[rank] + peer * part)
                    back = ctypes.c_void_p(receive[rank] + peer * part)
                    self._call("ncclSend", there, _size(part), _INT8, peer, *tail)
                    self._call("ncclRecv", back, _size(part), _INT8, peer, *tail)
        self._call("ncclGroupEnd")

    def close(self) -> None:
        """Destroy the communicator."""
        for rank in range(self.ranks):
            self._call("ncclCommDestroy", self._comm(rank))

    def _comm(self, rank: int) -> Any:
        return ctypes.c_void_p(self._comms[rank])

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            say = self._library.ncclGetErrorString
            say.restype = ctypes.c_char_p
            raise TaskFailed(f"{name}: {say(code).decode()}")


def _size(count: int) -> Any:
    return ctypes.c_size_t(count)
