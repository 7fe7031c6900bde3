"""Import of NCCL XML, nvidia-smi matrices and edge lists: round trips, and hostile files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesim.hwmodels import InputError, load_cluster
from moesim.hwmodels.importers import ImportedTopology, import_topology
from moesim.hwmodels.importers.nccl_xml import MAX_DEPTH
from moesim.hwmodels.node import load_node
from moesim.hwmodels.provenance import Sourced


def nccl(gpus: int = 8, links: str = "", speed: str = "32.0 GT/s PCIe", net: int = 400000) -> str:
    """A dump as NCCL writes it: two sockets, a PCIe switch for every GPU and its NIC."""
    cpus = []
    for socket in range(2):
        body = ""
        for gpu in range(socket * gpus // 2, (socket + 1) * gpus // 2):
            inside = links.replace("$GPU", str(gpu))
            body += (
                f'<pci busid="0000:{gpu}0:00.0" class="0x060400" link_speed="{speed}" link_width="16">'
                f'<pci busid="0000:{gpu}1:00.0" class="0x030200" link_speed="{speed}" link_width="16">'
                f'<gpu dev="{gpu}" sm="90" rank="{gpu}" gdr="1">{inside}</gpu></pci>'
                f'<pci busid="0000:{gpu}2:00.0" class="0x020700" link_speed="{speed}" link_width="16">'
                f'<nic><net name="mlx5_{gpu}" dev="{gpu}" speed="{net}" port="1" gdr="1"/></nic>'
                f"</pci></pci>"
            )
        cpus.append(f'<cpu numaid="{socket}" arch="x86_64" vendor="GenuineIntel">{body}</cpu>')
    return f'<system version="1">{"".join(cpus)}</system>'


SWITCHED = "".join(
    f'<nvlink target="0000:0{n}:00.0" count="{count}" tclass="0x068000"/>'
    for n, count in enumerate((5, 4, 5, 4))
)
MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t@a\t@b\t@b\tPXB\tSYS\t0-47\t0\t\tN/A
GPU1\t@a\t X \t@b\t@b\tPXB\tSYS\t0-47\t0\t\tN/A
GPU2\t@b\t@b\t X \t@a\tSYS\tPXB\t48-95\t1\t\tN/A
GPU3\t@b\t@b\t@a\t X \tSYS\tPXB\t48-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def read(
    tmp_path: Path, text: str, like: str = "hgx-h200", nodes: int = 1, network: str | None = None
) -> ImportedTopology:
    """The import, whose file is read back as the same cluster."""
    path = tmp_path / "My Machine.txt"
    path.write_text(text)
    imported = import_topology(path, like, nodes, network, date="2026-11-20")
    written = tmp_path / "cluster.yaml"
    written.write_text(imported.text)
    again = load_cluster(str(written))
    assert again == imported.cluster
    assert again.name == "my-machine"
    return imported


def test_nccl_xml_behind_switches(tmp_path: Path) -> None:
    imported = read(tmp_path, nccl(links=SWITCHED), nodes=4, network="mrft-ib-400g")
    cluster = imported.cluster
    assert (cluster.n_gpus, cluster.node.n_gpus, cluster.accelerator.name) == (32, 8, "h200-sxm")
    assert cluster.node.scale_out_bytes_per_s == 50e9 and cluster.node.n_nics_per_gpu == 1
    assert cluster.node.nic_bandwidth is not None
    assert cluster.node.nic_bandwidth.kind == "measured" and "My Machine.txt" in cluster.node.gpus.source
    assert "all GPUs behind switches, 18 links each" in imported.understood
    assert [link.kind for link in cluster.topology().route(0, 7)] == ["nvlink", "nvlink"]


def test_figures_that_the_file_does_not_state_keep_their_own_provenance(tmp_path: Path) -> None:
    """A matrix shows how many NICs there are, but no rate: that is the figure of the node it is like."""
    matrix = MATRIX.replace("@a", "NV18").replace("@b", "NV18")
    like = load_node("hgx-h200").nic_bandwidth
    four = matrix.replace("\tNIC0\tNIC1\t", "\tNIC0\tNIC1\tNIC2\tNIC3\t").replace(
        "\tPXB\tSYS\t", "\tPXB\tSYS" * 2 + "\t"
    )
    four = four.replace("\tSYS\tPXB\t48", "\tSYS\tPXB\tSYS\tPXB\t48")
    node = read(tmp_path, four).cluster.node
    rate = node.nic_bandwidth
    assert like is not None and rate is not None and node.n_nics_per_gpu == 1
    assert (rate.value, rate.kind, rate.date) == (like.value, like.kind, like.date)
    assert rate.source.startswith("as node hgx-h200 (--like), not stated in") and like.source in rate.source
    shared = read(tmp_path, matrix).cluster.node.nic_bandwidth
    assert shared is not None and (shared.value, shared.kind) == (like.value / 2, "derived")
    assert "node hgx-h200 (--like)" in shared.source and "2 NICs for 4 GPUs" in shared.source


@pytest.mark.parametrize("net", [400000, 200000])
def test_no_figure_claims_to_be_read_from_a_file_that_does_not_state_it(tmp_path: Path, net: int) -> None:
    imported = read(tmp_path, nccl(links=SWITCHED, net=net))
    node = imported.cluster.node
    figures = {
        name: figure for name in type(node).model_fields if isinstance(figure := getattr(node, name), Sourced)
    }
    measured = {name for name, figure in figures.items() if figure.kind == "measured"}
    assert {name for name in measured if "My Machine" in figures[name].source} == {
        "gpus", "nics_per_gpu", "nic_bandwidth",
    }  # fmt: skip
    assert node.scale_out_bytes_per_s == net * 1e6 / 8
    assert node.scale_out_effective_bytes_per_s == pytest.approx(0.8 * node.scale_out_bytes_per_s)
    effective = figures["nic_bandwidth_effective"]
    assert effective.kind == "derived" and "payload share 0.8 of a NIC of node hgx-h200" in effective.source
    assert imported.cluster.source.startswith("moesim import topology: My Machine.txt like node hgx-h200")


def test_nccl_xml_of_a_mesh(tmp_path: Path) -> None:
    full = nccl(4)
    for gpu in range(4):
        to = "".join(
            f'<xgmi target="0000:{o}1:00.0" count="1" tclass="0x038000"/>' for o in range(4) if o != gpu
        )
        full = full.replace(f'rank="{gpu}" gdr="1"></gpu>', f'rank="{gpu}" gdr="1">{to}</gpu>')
    topo = read(tmp_path, full).cluster.topology()
    assert [link.id for link in topo.route(1, 3)] == ["gpu:1->gpu:3"]
    assert topo.route(1, 3)[0].nominal_bytes_per_s == pytest.approx(450e9 / 3)


def test_nccl_xml_of_pcie_only(tmp_path: Path) -> None:
    imported = read(tmp_path, nccl(4))
    topo = imported.cluster.topology()
    ids = [link.id for link in topo.route(0, 3)]
    assert ids == [
        "gpu:0->pci:0000:00:00.0", "pci:0000:00:00.0->cpu:0", "cpu:0->cpu:1",
        "cpu:1->pci:0000:30:00.0", "pci:0000:30:00.0->gpu:3",
    ]  # fmt: skip
    assert topo.route(0, 3)[0].bytes_per_s == pytest.approx(63.015e9, rel=1e-4)
    assert any("sockets" in text for text in imported.assumed)


@pytest.mark.parametrize(
    ("near", "far", "shape"), [("NV18", "NV18", "nvlink"), ("NV6", "NV6", "mesh"), ("PIX", "SYS", "edge")]
)
def test_smi_matrix(tmp_path: Path, near: str, far: str, shape: str) -> None:
    topo = read(tmp_path, MATRIX.replace("@a", near).replace("@b", far)).cluster.topology()
    assert topo.n_gpus == 4
    assert topo.links().kinds[0] == shape
    src, dst = np.triu_indices(4, 1)
    assert (np.diff(topo.routes(src, dst).indptr) > 0).all()
    if shape == "edge":
        assert [link.head for link in topo.route(0, 1)] == ["pcie:0", "gpu:1"]
        assert "host:0" in [link.head for link in topo.route(0, 2)]


def test_smi_matrix_with_bridges_between_pairs(tmp_path: Path) -> None:
    imported = read(tmp_path, MATRIX.replace("@a", "NV4").replace("@b", "NODE"))
    topo = imported.cluster.topology()
    assert [link.id for link in topo.route(0, 1)] == ["gpu:0->gpu:1"]
    assert len(topo.route(0, 2)) == 4
    assert imported.cluster.node.n_nics_per_gpu == 1  # two NICs for four GPUs: half a NIC each
    assert imported.cluster.node.scale_out_bytes_per_s == 25e9


def test_edge_list(tmp_path: Path) -> None:
    lines = ["# two servers of two", *(f"gpu:{g} s{g // 2} 100GB/s 1us" for g in range(4)), "s0 s1 50GB/s"]
    topo = read(tmp_path, "\n".join(lines), nodes=2).cluster.topology()
    route = topo.route(0, 3)
    assert [link.id for link in route] == ["gpu:0->s0", "s0->s1", "s1->gpu:3"]
    assert [link.bytes_per_s for link in route] == [100e9, 50e9, 100e9]
    assert [link.latency_s for link in route] == pytest.approx([1e-6, 1.4e-6, 1e-6])


LAUGHS = '<!DOCTYPE s [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><system>&b;</system>'
GOOD = nccl(links=SWITCHED)
PCI = '<pci busid="$N" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="$N"/></pci>'
CPU = f"<cpu>{PCI}</cpu>"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "document type"),
        ("<system>&lt;&x;</system>", "not well-formed"),
        ("<?php x ?><system/>", "processing instruction"),
        ("<system>" + "<pci>" * MAX_DEPTH, "levels"),
        ("<system>" + "<pci/>" * 100_001, "more than 20,000 elements"),
        ("<system/>", "no <gpu>"),
        (f'<system a="{"x" * 10_001}"/>', "longer than"),
        ("<topology/>", "starts with <system>"),
        (GOOD.replace('count="5"', 'count="-5"'), "count='-5'"),
        (GOOD.replace('dev="3"', 'dev="2"'), "same dev"),
        (GOOD.replace('speed="400000"', 'speed="fast"'), "speed='fast'"),
        (GOOD.replace("0x068000", "0x010000"), "neither a GPU"),
        (nccl(4, speed="Unknown"), "no usable link_speed"),
        (nccl(4).replace("0000:10:00.0", "a b;c"), "no PCI bus id"),
        ("gpu:0 gpu:1 0GB/s", "is zero"),
        ("gpu:0 gpu:1 5", "bare number"),
        ("gpu:0 gpu:0 5GB/s", "joined to itself"),
        ("a b 5GB/s", "no name like gpu:0"),
        ("gpu:0 gpu:1 5GB/s\ngpu:2 gpu:3 5GB/s", "not connected: rank gpu:2, gpu:3"),
        ("gpu:0 gpu:2 5GB/s", "gpu:1 has no edge"),
        ("   \n", "empty"),
        ("\n" * 100_000 + "x", "edge 100001"),
        ("<system>" + CPU.replace("$N", "1") * 65 + "</system>", "same dev or busid"),
        (f"<system>{''.join(CPU.replace('$N', str(n)) for n in range(65))}</system>", "65 <cpu> with GPUs"),
        (f"<system><cpu>{''.join(PCI.replace('$N', str(n)) for n in range(257))}</cpu></system>", "257 GPUs"),
        (" ".join(f"GPU{n}" for n in range(257)), "257 GPUs"),
        ("gpu:0 gpu:1 5GB/s\n" * 15_001, "15,001 links"),
        ("gpu:0 gpu:1 1e-300GB/s", "nearest: 1 MB/s"),
        ("gpu:0 gpu:1 5GB/s 1e300s", "nearest: 10000000000 s"),
        ("gpu:0\0", "zero byte"),
        (MATRIX.replace("@a", "NV18").replace("@b", "NV99999"), "'NV99999' is no cell"),
        (MATRIX.replace("@a", "NV18", 1).replace("@a", "NV17").replace("@b", "SYS"), "disagree"),
        (MATRIX.replace("@a", "NV1").replace("@b", "SYS").replace("\nGPU3\t", "\nGPUX\t"), "GPU3 is missing"),
        ("GPU0 GPU1\nGPU0 X\nGPU1 NV1 X\n", "2 cells belong there"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        import_topology(path, "hgx-h200")
    assert "bad.txt" in str(caught.value) and len(str(caught.value)) < 600


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    with pytest.raises(InputError, match="cannot be read"):
        import_topology(path, "hgx-h200")
    path.write_bytes(b"<system \xff>")
    with pytest.raises(InputError, match="not UTF-8"):
        import_topology(path, "hgx-h200")
    path.write_bytes(b" " * 4_000_001)
    with pytest.raises(InputError, match="larger than the limit of 4 MB"):
        import_topology(path, "hgx-h200")


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text(GOOD)
    with pytest.raises(InputError, match="name the network"):
        import_topology(path, "hgx-h200", nodes=2)
    with pytest.raises(InputError, match="unknown node 'hgx-h2000'"):
        import_topology(path, "hgx-h2000")
    with pytest.raises(InputError, match="at least 1"):
        import_topology(path, "hgx-h200", nodes=0)
    path.write_text(nccl(4))
    with pytest.raises(InputError, match="not all pairs"):
        import_topology(path, "hgx-h200", nodes=2, network="mrft-ib-400g")
    path.write_text("gpu:0 gpu:1 5GB/s\ngpu:2 gpu:1 5GB/s")
    with pytest.raises(InputError, match="is the network already"):
        import_topology(path, "hgx-h200", network="mrft-ib-400g")
    with pytest.raises(InputError, match="3 GPUs do not divide into --nodes 2"):
        import_topology(path, "hgx-h200", nodes=2)
