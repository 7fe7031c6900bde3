"""The same training job on another cluster: its size, its network, and the keys that fit its accelerator."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.cluster import Cluster, list_clusters, load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import network_of, with_default_price

ODD_FACTORS = (1, 3, 5, 7)
"""Odd factors of a number of nodes into which batches and layers usually split."""


def own_cluster(scenario: Scenario, name: str) -> bool:
    """Whether a name means the scenario's own cluster, with the changes that the scenario states."""
    return scenario.machine.name == name


def machine_of(scenario: Scenario, name: str) -> Cluster:
    """The scenario's own cluster, or the shipped one of this name; raises InputError for an unknown name."""
    if own_cluster(scenario, name):
        return scenario.machine
    if name not in list_clusters():
        raise InputError(f"cluster {name!r} is not shipped{nearest(name, list(list_clusters()))}")
    return with_default_price(load_cluster(name))


def on_cluster(scenario: Scenario, name: str, gpus: int | None = None) -> Scenario:
    """The scenario's model, batch and run on a shipped cluster, or on its own where `name` is that.

    `gpus`: number of accelerators; None keeps the cluster's own number. What only the old accelerator has is
    left to the rules, as for every override (`moesim.simulator.scenario.machine`). Degrees of parallelism
    stay as they are: they are what a search replaces. A network that does not join the nodes gives way to the
    smallest shipped one that does. Raises InputError for an unknown cluster, and for a number of GPUs that is
    no whole number of nodes or that no shipped network joins.
    """
    own, cluster = own_cluster(scenario, name), machine_of(scenario, name)
    nodes = cluster.nodes if gpus is None else whole_nodes(cluster, gpus)
    changes: dict[str, Any] = {} if own else {"cluster": name}
    if nodes != cluster.nodes:
        changes["cluster.nodes"] = nodes
        network = _network(cluster, nodes)
        if network is not None:
            changes["cluster.network"] = network
    return scenario.replace(**changes) if changes else scenario


def whole_nodes(cluster: Cluster, gpus: int) -> int:
    """Number of nodes with exactly this many accelerators; raises InputError where none is."""
    per_node = cluster.node.n_gpus
    nodes, rest = divmod(gpus, per_node)
    if rest or not nodes:
        near = sorted({max(1, nodes) * per_node, (nodes + 1) * per_node})
        told = " and ".join(f"{number:,}" for number in near)
        raise InputError(
            f"{gpus:,} {cluster.accelerator.name} are not a whole number of nodes, as a node has "
            f"{per_node:,} of them; near to it {'is' if len(near) == 1 else 'are'} {told}",
            key="gpus",
            nearest=near,
        )
    return nodes


def even_nodes(most: int) -> int:
    """The largest number of nodes up to `most` (at least 1) of the form 1, 3, 5 or 7 times a power of two."""
    return max(odd << k for odd in ODD_FACTORS for k in range(most.bit_length()) if odd << k <= most)


def _network(cluster: Cluster, nodes: int) -> str | None:
    """A shipped network for `nodes` nodes where the cluster's own does not join them; None where it does."""
    try:
        cluster.model_copy(update={"nodes": nodes}).topology()
    except InputError:
        pass
    else:
        return None
    try:
        return network_of(cluster.node, nodes)
    except InputError as error:
        raise InputError(
            f"{nodes:,} nodes of {cluster.name} cannot be joined: its network {cluster.network.name} has no "
            f"room for them, and no other is known ({error})"
        ) from None
