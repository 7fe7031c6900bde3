"""Number of GPUs of a launch file, and the base's cluster with as many."""

from __future__ import annotations

import re
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.jobs.placement import MOST_GPUS_OF_A_HOST
from moesim.simulator.trainers.launch import LaunchFile, Unknown
from moesim.simulator.trainers.meaning.given import Given, unknown_value
from moesim.simulator.trainers.meaning.rows import MeaningRow

WORLD_SIZE = "WORLD_SIZE"
"""Environment variable with the number of processes."""

MOST_GPUS = 10_000_000

_DISAGREES = re.compile(r"(nodes|gpus_per_node) is (\d+ at .+?), but (\d+ at .+); the first is taken")
"""Note of the reader on two places that ask for different machines."""


def read_machine(given: Given, launch: LaunchFile, base: Scenario, gpus: int | None = None) -> int:
    """Number of GPUs that the file asks for, or the base's; sets `cluster` where the base has others.

    `gpus` replaces the file's number.

    Raises InputError where the file contradicts itself, and where the base's cluster cannot have as many.
    """
    sizes = [(machine.nodes, machine.node.n_gpus) for machine in base.machines]
    own = sum(nodes * gpus for nodes, gpus in sizes)
    asked, place = _asked(launch, base) if gpus is None else (gpus, "--gpus of this command")
    if asked is None or asked == own:
        text = f"{own} GPUs: " + (
            "the file does not say how many" if asked is None else "as many as asked for"
        )
        given.rows.append(MeaningRow("GPUs", "" if asked is None else str(asked), "base", text, place))
        return own
    if base.fleet is not None:
        raise InputError(
            f"{place}: asks for {asked} GPUs, and the base's fleet has {own}; give another --base"
        )
    per_node = sizes[0][1]
    if asked % per_node and asked > per_node:
        raise InputError(
            f"{place}: asks for {asked} GPUs, no multiple of the {per_node} of a node of the base's cluster "
            f"{base.machine.name}; give another --base"
        )
    if asked < per_node:
        raise InputError(
            f"{place}: asks for {asked} GPUs, fewer than the {per_node} of one node of the base's cluster "
            f"{base.machine.name}; give another --base"
        )
    given.keys["cluster"] = cluster_with(base, asked // per_node, f"{place}: asks for {asked} GPUs")
    nodes = asked // per_node
    given.rows.append(
        MeaningRow("GPUs", str(asked), "key", f"cluster.nodes = {nodes} (the base has {own} GPUs)", place)
    )
    return asked


def cluster_with(base: Scenario, nodes: int, asked: str) -> Any:
    """Data of the base's cluster with another number of nodes, on a larger network if it needs one."""
    first: InputError | None = None
    for other in (_same_network, _other_network):
        try:
            changed = other(base, nodes)
            changed.machine.topology()
        except InputError as error:
            first = first or error
        else:
            return changed.to_dict()["cluster"]
    raise InputError(f"{asked}, which the base's cluster {base.machine.name} cannot have: {first}")


def _same_network(base: Scenario, nodes: int) -> Scenario:
    return base.overridden(f"cluster.nodes={nodes}")


def _other_network(base: Scenario, nodes: int) -> Scenario:
    machine = base.machine
    price = machine.price_per_gpu_hour
    outline: dict[str, Any] = {
        "node": machine.node.model_dump(mode="json", exclude_none=True),
        "nodes": nodes,
    }
    if price is not None:
        outline["price_per_gpu_hour"] = price.model_dump(mode="json", exclude_none=True)
    return base.replace(cluster=outline)


def _asked(launch: LaunchFile, base: Scenario) -> tuple[int | None, str]:
    """GPUs that launcher and environment ask for, and where; None where they do not say.

    Nodes whose GPUs the file does not state have those of a node of the base, where that is one host.
    """
    for note in launch.notes:
        if disagreement := _DISAGREES.fullmatch(note):
            what = {"nodes": "nodes", "gpus_per_node": "GPUs of a node"}[disagreement[1]]
            raise InputError(
                f"the file asks for different numbers of {what}: {disagreement[2]} and {disagreement[3]}; "
                "correct one, or give --gpus"
            )
    machine, answers = launch.machine, []
    nodes, gpus = _whole(machine.nodes), _whole(machine.gpus_per_node)
    if nodes is not None and gpus is not None:
        places = [machine.places[key] for key in ("nodes", "gpus_per_node") if key in machine.places]
        answers.append((nodes * gpus, " and ".join(dict.fromkeys(places)) or "the launcher"))
    elif isinstance(machine.nodes, Unknown):
        raise InputError(
            unknown_value("the number of nodes", machine.nodes, machine.places.get("nodes", "launcher"))
        )
    elif isinstance(machine.gpus_per_node, Unknown):
        place = machine.places.get("gpus_per_node", "launcher")
        raise InputError(unknown_value("the number of GPUs of a node", machine.gpus_per_node, place))
    elif nodes is not None:
        answers.append((nodes * _in_a_host(nodes, launch, base), machine.places.get("nodes", "the launcher")))
    world = launch.environment.get(WORLD_SIZE)
    if isinstance(world, str) and world.isascii() and world.isdigit() and len(world) < 9:
        answers.append((int(world), WORLD_SIZE))
    if len({count for count, _ in answers}) > 1:
        parts = " and ".join(f"{place} {count}" for count, place in answers)
        raise InputError(f"the file asks for different numbers of GPUs: {parts}; correct one")
    if not answers:
        return None, ""
    count, place = answers[0]
    if not 0 < count <= MOST_GPUS:
        raise InputError(f"{place}: {count} GPUs are outside the limits 1 to {MOST_GPUS}")
    return count, place


def _in_a_host(nodes: int, launch: LaunchFile, base: Scenario) -> int:
    """GPUs of a node of the base; raises InputError where the base's nodes hold several hosts."""
    per_node = base.machines[0].node.n_gpus
    if per_node > MOST_GPUS_OF_A_HOST:
        place = launch.machine.places.get("nodes", "the launcher")
        raise InputError(
            f"{place}: asks for {nodes} nodes and does not say how many GPUs each has; a node of the base's "
            f"cluster is a scale-up domain of {per_node} GPUs on several hosts, so give --gpus N"
        )
    return per_node


def _whole(value: int | Unknown | None) -> int | None:
    return value if isinstance(value, int) else None
