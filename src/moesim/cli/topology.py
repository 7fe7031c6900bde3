"""The commands `topology`, which counts a network's parts and cost, and `import topology`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.console import (
    AsJson,
    Force,
    check_new,
    print_json,
    print_pairs,
    print_table,
    print_text,
    say_written,
)
from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.hwmodels.topologies import Topology


def topology(
    name: Annotated[
        str | None, typer.Argument(help="A cluster, or a network with --node and --nodes (name or file).")
    ] = None,
    node: Annotated[str, typer.Option(help="Node on a network.")] = "hgx-h800",
    nodes: Annotated[int | None, typer.Option(help="Nodes on a network.", min=1)] = None,
    as_json: AsJson = False,
    kinds: Annotated[
        bool, typer.Option("--kinds", help="List the kinds of topology and the keys of their files.")
    ] = False,
) -> None:
    """Count a topology's switches and cables, and say what they cost.

    Without a name, networks at full size are compared with the published table (arXiv 2505.09343, Table 3).
    """
    if kinds:
        _print_kinds(as_json)
        return
    if name is None:
        _compare(as_json)
        return
    built, title = _build(name, node, nodes)
    facts = _facts(built)
    if as_json:
        print_json({"name": name, **facts})
        return
    print_pairs({"topology": title, "kind": built.kind, "GPUs": f"{built.n_gpus:,}"})
    rows = [(what, part, f"{n:,}") for what in ("switches", "cables") for part, n in facts[what].items()]
    rows += [
        ("", label.replace("_", " "), f"{facts[label]:,}")
        for label in ("endpoints", "inter_switch_links", "switch_ports", "transceivers")
    ]
    rows.append(("", "links of the longest route", str(facts["longest_route_links"])))
    rows += [("cost", part, f"${usd:,.0f}") for part, usd in facts["cost_usd"].items()]
    if facts["usd_per_endpoint"] is not None:
        rows.append(("cost", "for each endpoint", f"${facts['usd_per_endpoint']:,.0f}"))
    print_table(("", "part", "count"), rows, right=(2,))


def _print_kinds(as_json: bool) -> None:
    """Print every registered topology: kind, keys of `fabric`, an example and a description."""
    from moesim.hwmodels.topologies.description import ScaleOutFabric
    from moesim.hwmodels.topologies.part import kind_rows
    from moesim.hwmodels.topologies.registry import SCALE_OUT, SCALE_UP

    if as_json:
        print_json({"scale_up": kind_rows(SCALE_UP), "scale_out": kind_rows(SCALE_OUT)})
        return
    for title, specs in (("scale-up file", SCALE_UP), ("network file", SCALE_OUT)):
        columns = (f"kind of a {title}", "keys of fabric", "example", "what it is")
        print_table(columns, [tuple(row.values()) for row in kind_rows(specs)])
    print_text(f"every network with a fabric also states {', '.join(ScaleOutFabric.model_fields)}")


def _build(name: str, node: str, nodes: int | None) -> tuple[Topology, str]:
    """Topology and title of a cluster, or of a network with its nodes, given by name or file."""
    from moesim.hwmodels import list_clusters, list_networks, load_cluster, load_network, load_node
    from moesim.hwmodels.topologies import build_topology
    from moesim.hwmodels.validation import nearest
    from moesim.hwmodels.yaml_io import EXTENSIONS, load_mapping

    is_file = name.lower().endswith(EXTENSIONS)
    if name in list_clusters() or (is_file and "node" in load_mapping(name)):
        cluster = load_cluster(name)
        return cluster.topology(), cluster.title
    if name not in list_networks() and not is_file:
        known = sorted([*list_clusters(), *list_networks()])
        raise InputError(
            f"unknown topology {name!r}{nearest(name, known)}; the clusters are "
            f"{', '.join(list_clusters())}, the networks {', '.join(list_networks())}, or give a file"
        )
    network = load_network(name)
    if nodes is None and network.fabric is not None:
        raise InputError(f"{name} is a network: say how many nodes it joins, such as --nodes 256")
    return build_topology(load_node(node), nodes or 1, network), network.title


def _facts(built: Topology) -> dict[str, Any]:
    counted = built.inventory()
    parts = ("switches", "cables", "endpoints", "inter_switch_links", "switch_ports", "transceivers")
    costs = ("cost_usd", "total_usd", "usd_per_endpoint")
    return {
        "kind": built.kind,
        "gpus": built.n_gpus,
        **{key: getattr(counted, key) for key in parts},
        "longest_route_links": built.longest_route(),
        **{key: getattr(counted, key) for key in costs},
    }


def _compare(as_json: bool) -> None:
    from moesim.hwmodels.cluster import PRICES, compare_networks, published_table
    from moesim.hwmodels.price import load_fabric_prices

    cells = compare_networks()
    if as_json:
        keys = ("network", "figure", "published", "ours", "relative_error")
        print_json([{key: getattr(cell, key) for key in keys} for cell in cells])
        return
    rows = [
        (c.network, c.figure, f"{c.published:,g}", f"{c.ours:,.6g}", f"{100 * c.relative_error:+.1f} %")
        for c in cells
    ]
    table, prices = published_table(), load_fabric_prices(PRICES)
    print_text(f"{table.title}: {table.source}")
    print_table(("network", "figure", "published", "ours", "error"), rows, right=(2, 3, 4))
    print_text(f"cost: a switch {prices.switch.text}, a link {prices.link.text} ({prices.link.source})")


def _list_forms(wanted: bool) -> None:
    if wanted:
        from moesim.hwmodels.importers.topology import EDGE_LIST_FORM, MACHINE_FORMS

        for text in (*MACHINE_FORMS, EDGE_LIST_FORM):
            print_text(text)
        raise typer.Exit


def import_topology(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A file of a form that --forms lists, or an edge list."),
    ],
    like: Annotated[str, typer.Option(help="A shipped node for figures that the file does not state.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the cluster here.")] = None,
    nodes: Annotated[int, typer.Option(help="Servers of the cluster.")] = 1,
    network: Annotated[str | None, typer.Option(help="Network that joins several servers.")] = None,
    as_json: AsJson = False,
    force: Force = False,
    forms: Annotated[
        bool,
        typer.Option(
            "--forms", callback=_list_forms, is_eager=True, help="List the forms of file, and exit."
        ),
    ] = False,
) -> None:
    """Read the topology of a machine or cluster into a cluster file."""
    from moesim.hwmodels.files import write_atomically
    from moesim.hwmodels.importers import import_topology as read

    check_new(output, force, yaml_of="cluster")
    imported = read(file, like, nodes, network)
    if output is not None:
        write_atomically(output, [imported.text])
    told = {"understood": imported.understood, "assumed": imported.assumed}
    if as_json:
        print_json({**told, **_facts(imported.cluster.topology())})
    else:
        for what, texts in told.items():
            for text in texts:
                print_text(f"{what}: {text}")
    if output is not None:
        say_written(str(output), "use its path as `cluster` in a scenario")
