from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels import Cluster, InputError, load_cluster, load_node, provenance_rows, validate_model

SMALL: dict[str, Any] = {"node": "hgx-h800", "nodes": 4, "network": "mpft-ib-400g"}


def test_the_home_case() -> None:
    cluster = load_cluster("deepseek-h800-2048")
    assert (cluster.n_gpus, cluster.nodes, cluster.node.n_gpus) == (2048, 256, 8)
    assert cluster.usd_per_gpu_hour == 2.0
    assert cluster.network.kind == "multi-plane-fat-tree"
    assert cluster.node.scale_up_achievable_bytes_per_s == 160e9
    assert cluster.node.scale_out_bytes_per_s == 50e9
    assert cluster.node.scale_out_effective_bytes_per_s == 40e9
    paths = {row.path for row in provenance_rows(cluster, "cluster")}
    assert {"cluster.price_per_gpu_hour", "cluster.node.accelerator.peak.bf16"} <= paths


def test_a_cluster_from_names() -> None:
    cluster = validate_model(Cluster, SMALL, "s.yaml")
    assert cluster.n_gpus == 32
    assert cluster.topology().n_gpus == 32
    with pytest.raises(InputError, match="'custom' has no price_per_gpu_hour"):
        _ = cluster.usd_per_gpu_hour


def test_dumps_load_back() -> None:
    cluster = load_cluster("deepseek-h800-2048")
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster
    assert validate_model(Cluster, cluster.model_dump(mode="json"), "dump.json") == cluster


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 0}, ["s.yaml: nodes=0", "greater than or equal to 1"]),
        ({"nodes": 2.5}, ["nodes=2.5"]),
        ({"node": "hgx-h801"}, ["s.yaml: node: unknown node 'hgx-h801' (nearest: 'hgx-h800')"]),
        ({"network": "mpft"}, ["s.yaml: network: unknown network 'mpft'", "mpft-ib-400g"]),
        ({"network": "single-node"}, ["nodes=4", "exactly 1 node"]),
        ({"nodes": 4000}, ["at most 64 leaves (2048 endpoints)", "125 are needed"]),
        ({"network": "mrft-ib-400g", "nodes": 257}, ["at most 64 leaves"]),
        ({"price_per_gpu_hour": 2}, ["price_per_gpu_hour: '2'", "bare number", "$2/h"]),
        ({"nods": 3}, ["nods: unknown key (nearest: 'nodes')"]),
        (
            {"network": {"name": "x", "title": "y", "kind": "fat-tree"}},
            ["network: a network of kind 'fat-tree' needs"],
        ),
    ],
)
def test_bad_clusters(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        validate_model(Cluster, SMALL | change, "s.yaml")
    for word in words:
        assert word in str(caught.value)


def test_planes_must_divide_the_gpus_of_a_node() -> None:
    network = load_cluster("deepseek-h800-2048").network.model_dump(mode="json")
    network["fabric"]["planes"]["value"] = 3
    with pytest.raises(InputError, match=r"planes=3 does not divide the 8 GPUs.*legal: 1, 2, 4, 8"):
        validate_model(Cluster, SMALL | {"network": network}, "s.yaml")


def test_a_cluster_file_may_name_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text(load_node("hgx-h20").model_dump_json())
    path = tmp_path / "cluster.yaml"
    path.write_text("node: node.json\nnodes: 2\nnetwork: mrft-ib-400g\nprice_per_gpu_hour: $3/h\n")
    cluster = load_cluster(str(path))
    assert cluster.accelerator.name == "h20"
    assert cluster.usd_per_gpu_hour == 3.0


def test_json_schema_takes_names_and_short_quantities() -> None:
    schema = Cluster.model_json_schema()
    node = schema["properties"]["node"]["anyOf"]
    assert {"type": "string"} in node
    assert {"$ref": "#/$defs/Node"} in node
    price = schema["$defs"]["RentPrice"]["anyOf"]
    assert {"type": "string"} in price
    assert price[0]["properties"]["value"]["examples"] == ["$2/h"]
