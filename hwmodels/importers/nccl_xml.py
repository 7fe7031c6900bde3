"""Reads NCCL topology XML, safely."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn
from xml.parsers import expat

from msgspec import Struct, field
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.importers.machine import MOST_GPUS, MOST_SOCKETS, ImportedMachine, MachineForm, rate_text

# -- safe XML --------------------------------------------------------------------------------------

MAX_ELEMENTS = 20_000
MAX_DEPTH = 64
MAX_ATTRIBUTE = 10_000


class Element(Struct):
    """One element: its tag, attributes and children."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)

    def all(self, *tags: str) -> Iterator[Element]:
        """This element and everything below it with one of these tags, in document order."""
        if self.tag in tags:
            yield self
        for child in self.children:
            yield from child.all(*tags)


def parse_xml(text: str, name: str) -> Element:
    """The root element of `text`; errors mention the file `name` and the line.

    Raises InputError for malformed XML, anything that declares a document type or entity (nested entities
    expand to gigabytes, external ones read other files), processing instructions, and documents beyond
    20,000 elements or 64 levels.
    """
    parser = expat.ParserCreate()
    root: list[Element] = []
    stack: list[Element] = []
    count = 0

    def refuse(what: str) -> NoReturn:
        raise InputError(f"{name}: line {parser.CurrentLineNumber}: {what}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MAX_ELEMENTS or len(stack) >= MAX_DEPTH:
            refuse(f"more than {MAX_ELEMENTS:,} elements or {MAX_DEPTH} levels; this is no topology")
        if any(len(value) > MAX_ATTRIBUTE for value in attributes.values()):
            refuse(f"an attribute of <{tag[:40]}> is longer than {MAX_ATTRIBUTE:,} characters")
        element = Element(tag, attributes)
        (stack[-1].children if stack else root).append(element)
        stack.append(element)

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: stack.pop() and None
    parser.StartDoctypeDeclHandler = lambda *_: refuse("a document type (DTD) is refused; delete it")
    parser.EntityDeclHandler = lambda *_: refuse("an entity declaration is refused; write the text out")
    parser.UnparsedEntityDeclHandler = lambda *_: refuse("an entity declaration is refused")
    parser.ExternalEntityRefHandler = lambda *_: refuse("an external entity is refused")
    parser.ProcessingInstructionHandler = lambda *_: refuse("a processing instruction is refused")
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        reason = expat.errors.messages.get(error.code, "malformed")
        raise InputError(f"{name}: line {error.lineno}: this is not well-formed XML ({reason})") from None
    return root[0]


# -- topologies ------------------------------------------------------------------------------------

_NVSWITCH_CLASS = "0x0680"


def read_nccl_xml(text: str, name: str) -> ImportedMachine:
    """The server that a NCCL topology file describes.

    `<system>` holds `<cpu>`s, these hold nested `<pci>` devices with `link_speed` ("32.0 GT/s PCIe") and
    `link_width`, and these hold `<gpu>` with `<nvlink target count tclass>` and `<nic>` with `<net speed>`
    in Mb/s. The class 0x068000 marks a link to a switch. Raises InputError for XML that is malformed or
    hostile, holds no GPU, or names GPUs that are not there.
    """
    root = parse_xml(text, name)
    if root.tag != "system":
        raise InputError(f"{name}: the root is <{root.tag[:40]}>, but a NCCL topology starts with <system>")
    gpus = _gpus(root, name)
    by_bus = {bus: index for index, (bus, _) in enumerate(gpus)}
    switch = [0] * len(gpus)
    pairs: dict[tuple[int, int], int] = {}
    for index, (_, gpu) in enumerate(gpus):
        for link in gpu.all("nvlink", "xgmi"):
            target = link.attributes.get("target", "")
            count = _integer(link, "count", name, default=1)
            if link.attributes.get("tclass", "").startswith(_NVSWITCH_CLASS):
                switch[index] += count
            elif target in by_bus and by_bus[target] != index:
                low, high = sorted((index, by_bus[target]))
                if pairs.setdefault((low, high), count) != count:
                    raise InputError(f"{name}: GPUs {low} and {high} disagree about the links between them")
            else:
                raise InputError(
                    f"{name}: GPU {index} has a {link.tag} to {target[:40]!r}, which is neither a GPU "
                    f"of the file nor marked as a switch (tclass {_NVSWITCH_CLASS}00)"
                )
    speeds = sorted({_integer(net, "speed", name) for net in root.all("net")})
    nets = len({net.attributes.get("name", str(i)) for i, net in enumerate(root.all("net"))})
    mixed = "NICs of {:g} to {:g} Gb/s: the fastest is taken for all"
    machine = ImportedMachine(
        form="NCCL topology XML",
        gpus=len(gpus),
        pair_links=pairs,
        switch_links=tuple(switch) if any(switch) else (),
        nics=nets,
        nic_bytes_per_s=speeds[-1] * 1e6 / 8 if speeds and speeds[-1] else None,
        notes=(mixed.format(speeds[0] / 1000, speeds[-1] / 1000),) if len(speeds) > 1 else (),
    )
    if machine.shape in ("pcie", "partial"):  # only then, for virtual machines often hide the PCIe speeds
        return replace(machine, edges=tuple(_pcie_edges(root, by_bus, name)))
    return machine


def _gpus(root: Element, name: str) -> list[tuple[str, Element]]:
    """(bus id, element) of every GPU, in the order of their device numbers."""
    gpus = [
        (_integer(gpu, "dev", name), pci.attributes.get("busid", ""), gpu)
        for pci in root.all("pci")
        for gpu in pci.children
        if gpu.tag == "gpu"
    ]
    if not gpus:
        raise InputError(f"{name}: there is no <gpu> inside a <pci>; dump it with NCCL_TOPO_DUMP_FILE")
    if len(gpus) > MOST_GPUS:
        raise InputError(f"{name}: {len(gpus):,} GPUs, but a server has at most {MOST_GPUS}")
    gpus.sort(key=lambda item: item[0])
    if len({dev for dev, *_ in gpus}) < len(gpus) or len({bus for _, bus, _ in gpus}) < len(gpus):
        raise InputError(f"{name}: two GPUs have the same dev or busid")
    return [(bus, gpu) for _, bus, gpu in gpus]


def _integer(element: Element, key: str, name: str, default: int | None = None) -> int:
    text = element.attributes.get(key)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,9}", text):
        shown = "missing" if text is None else repr(text[:40])
        raise InputError(f"{name}: <{element.tag}> {key}={shown}; a whole number is needed")
    return int(text)


def _pcie_edges(root: Element, by_bus: dict[str, int], name: str) -> list[str]:
    """The PCIe tree as edges; sockets are joined at the fastest rate in the file, which is an assumption."""
    edges: list[str] = []
    fastest = 0.0

    def walk(element: Element, parent: str) -> None:
        nonlocal fastest
        for child in element.children:
            if child.tag != "pci":
                continue
            bus = child.attributes.get("busid", "")
            is_gpu, below = bus in by_bus, any(child.all("gpu"))
            if not is_gpu and not below:
                continue
            here = f"gpu:{by_bus[bus]}" if is_gpu else f"pci:{bus}"
            if not re.fullmatch(r"[\w.:-]{1,40}", here):
                raise InputError(f"{name}: busid {bus[:40]!r} is no PCI bus id")
            # GT/s times lanes times the line code (128/130 from 8 GT/s on, 8/10 below); Gen5 x16: 63.0 GB/s
            match = re.fullmatch(r"(\d{1,3}(?:\.\d)?) ?GT/s.{0,20}", child.attributes.get("link_speed", ""))
            lanes = _integer(child, "link_width", name)
            if match is None or lanes == 0:
                raise InputError(f"{name}: <pci busid={bus[:40]!r}> has no usable link_speed and link_width")
            speed = float(match[1])
            rate = speed * 1e9 * lanes / 8 * (128 / 130 if speed >= 8 else 8 / 10)
            fastest = max(fastest, rate)
            edges.append(f"{here} {parent} {rate_text(rate)}")
            walk(child, here)

    cpus = [cpu for cpu in root.all("cpu") if any(cpu.all("gpu"))]
    if len(cpus) > MOST_SOCKETS:
        raise InputError(f"{name}: {len(cpus):,} <cpu> with GPUs, but a server has at most {MOST_SOCKETS}")
    for number, cpu in enumerate(cpus):
        walk(cpu, f"cpu:{number}")
    edges += [f"cpu:{n} cpu:{m} {rate_text(fastest)}" for m in range(len(cpus)) for n in range(m)]
    return edges


NCCL_XML = MachineForm(
    "NCCL topology XML",
    lambda text: text.lstrip().startswith("<"),
    lambda text, name, like: read_nccl_xml(text, name),  # the file is complete
)
