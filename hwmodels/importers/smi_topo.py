"""Reads the matrix of `nvidia-smi topo -m`, which shows how the GPUs and NICs of a server are joined."""

from __future__ import annotations

import re

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.importers.machine import MOST_GPUS, ImportedMachine, MachineForm, rate_text
from moesim.hwmodels.node import Node

_ANSI = re.compile(r"\x1b\[[0-9;]{0,20}m")
_CELL = re.compile(r"X|NV([1-9]\d?)|PIX|PXB|PHB|NODE|SYS")
NVLINK_BYTES_PER_S = 25e9
"""Rate of one NVLink 3 or 4 per direction. Later ones are faster, so a link count derived from this rate is
never too low."""
_NEARNESS = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 2, "SYS": 3}


def is_smi_topo(text: str) -> bool:
    """Whether a line of the text begins with GPU0, as in a topology matrix."""
    return any(line.split(maxsplit=1)[:1] == ["GPU0"] for line in _ANSI.sub("", text).splitlines())


def read_smi_topo(text: str, name: str, host_bytes_per_s: float, most_links: int) -> ImportedMachine:
    """The server that a topology matrix describes.

    The matrix shows the NVLinks of a pair, but not where they lead. Where all pairs together would need more
    links than a GPU has (`most_links`), they share a switch.
    `host_bytes_per_s` is the PCIe rate of a GPU, for pairs without NVLink. Raises InputError for text without
    a matrix, a row that is too short, unknown cells, and rows that disagree about a pair.
    """
    gpus, nics, cells = _matrix(_ANSI.sub("", text), name)
    pairs: dict[tuple[int, int], int] = {}
    for i in range(gpus):
        if cells[i][i] != "X":
            raise InputError(f"{name}: GPU{i} has {cells[i][i]!r} in its own column; X belongs there")
        for j in range(i + 1, gpus):
            if cells[i][j] != cells[j][i] or cells[i][j] == "X":
                raise InputError(
                    f"{name}: the rows of GPU{i} and GPU{j} disagree about their link: "
                    f"{cells[i][j]} and {cells[j][i]}"
                )
            match = _CELL.fullmatch(cells[i][j])
            if match and match[1]:
                pairs[i, j] = int(match[1])
    full = len(pairs) == gpus * (gpus - 1) // 2 and len(set(pairs.values())) == 1 and gpus > 1
    links = next(iter(pairs.values()), 0)
    switched = full and (links * (gpus - 1) > most_links)
    return ImportedMachine(
        form="nvidia-smi topo -m",
        gpus=gpus,
        pair_links={} if switched else pairs,
        switch_links=(links,) * gpus if switched else (),
        nics=nics,
        edges=tuple(_edges(cells, gpus, host_bytes_per_s)),
        notes=("the matrix states no rates: those of the node it is like",),
    )


def _matrix(text: str, name: str) -> tuple[int, int, list[list[str]]]:
    """(GPUs, NICs, cells [gpus][gpus + nics]) of the first matrix in the text."""
    lines = text.splitlines()
    head = next(
        (i for i, line in enumerate(lines) if line.split(maxsplit=1)[:1] == ["GPU0"] and "X" not in line),
        None,
    )
    if head is None:
        raise InputError(
            f"{name}: there is no line with GPU0, GPU1, ...; save the output of nvidia-smi topo -m"
        )
    columns = re.findall(r"\b(?:GPU|NIC|mlx\d?_|bnxt_re)\d+\b", lines[head])
    gpus = sum(column.startswith("GPU") for column in columns)
    if columns[:gpus] != [f"GPU{i}" for i in range(gpus)]:
        raise InputError(f"{name}: line {head + 1}: the GPUs are not numbered 0, 1, 2, ...")
    if gpus > MOST_GPUS:
        raise InputError(f"{name}: line {head + 1}: {gpus} GPUs, but a server has at most {MOST_GPUS}")
    rows: list[list[str]] = []
    for number, line in enumerate(lines[head + 1 :], head + 2):
        words = line.split()
        if not words or words[0] != f"GPU{len(rows)}" or len(rows) == gpus:
            continue
        cells = words[1 : 1 + len(columns)]
        bad = next((cell for cell in cells if not _CELL.fullmatch(cell)), None)
        if bad is not None or len(cells) < len(columns):
            what = (
                f"{len(columns)} cells belong there"
                if bad is None
                else f"{bad[:20]!r} is no cell of the matrix"
            )
            raise InputError(f"{name}: line {number}: row {words[0]}: {what}")
        rows.append(cells)
    if len(rows) < gpus:
        raise InputError(f"{name}: the row of GPU{len(rows)} is missing")
    return gpus, len(columns) - gpus, rows


def _edges(cells: list[list[str]], gpus: int, rate: float) -> list[str]:
    """Edges of a tree of PCIe switches and host bridges that places pairs as near as the matrix states."""

    def groups(most: int) -> list[int]:
        group = list(range(gpus))
        for i in range(gpus):
            for j in range(gpus):
                if i != j and _NEARNESS.get(cells[i][j], 3) <= most:
                    low, high = sorted((group[i], group[j]))
                    group = [low if g == high else g for g in group]
        return group

    switch, host = groups(1), groups(2)
    each = rate_text(rate)
    edges = [f"gpu:{i} pcie:{switch[i]} {each}" for i in range(gpus)]
    edges += [f"pcie:{s} host:{h} {each}" for s, h in sorted({(switch[i], host[i]) for i in range(gpus)})]
    hosts = sorted(set(host))
    return edges + [f"host:{a} host:{b} {each}" for a in hosts for b in hosts if a < b]


def _read(text: str, name: str, like: Node) -> ImportedMachine:
    figure = like.accelerator.host_bandwidth
    if figure is None:
        raise InputError(
            f"accelerator {like.accelerator.name!r} has no host_bandwidth; choose another --like"
        )
    most_links = round(like.accelerator.scale_up_bytes_per_s / NVLINK_BYTES_PER_S)
    return read_smi_topo(text, name, figure.value, most_links)


SMI_TOPO = MachineForm("nvidia-smi topo -m", is_smi_topo, _read)
