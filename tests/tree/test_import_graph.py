"""The graph of imports has no cycle: between modules, and between the packages of the simulator."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("simulator", "hwmodels", "kernels", "app")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its full name."""
    places = [(root, part) for part in PARTS] + [(root / "src" / "moesim", "cli")]
    found = {
        ".".join(("moesim", *path.relative_to(base).with_suffix("").parts)).removesuffix(".__init__"): path
        for base, part in places
        for path in sorted((base / part).rglob("*.py"))
    }
    for path in (root / "src" / "moesim").glob("*.py"):
        found[f"moesim.{path.stem}".removesuffix(".__init__")] = path
    return found


def imported(text: str, known: set[str]) -> Iterator[str]:
    """Modules that a text imports anywhere: inside functions and for the type checker too."""
    lines = re.findall(r"(?m)^ *((?:from|import) moesim[\w.]*(?: import (?:\([^)]*\)|[^(\n]+))?)", text)
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known or node.module in known:
                    yield full if full in known else node.module


def graph_of(texts: dict[str, str]) -> nx.DiGraph[str]:
    """An edge from every module to each that it imports."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(texts)
    known = set(texts)
    for name, text in texts.items():
        graph.add_edges_from((name, other) for other in imported(text, known) if other != name)
    return graph


def cycles(graph: nx.DiGraph[str]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    return [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]


def package(module: str) -> str:
    """The package below a part ("moesim.simulator.cost"); a module beside the packages stands for itself."""
    return ".".join(module.split(".")[:3])


def test_modules_and_packages_import_each_other_one_way_only() -> None:
    graph = graph_of({name: path.read_text("utf-8") for name, path in modules().items()})
    assert len(graph) > 300 and graph.number_of_edges() > 1000
    assert cycles(graph) == []
    packages: nx.DiGraph[str] = nx.DiGraph()
    packages.add_edges_from((package(a), package(b)) for a, b in graph.edges if package(a) != package(b))
    assert cycles(packages) == []


def test_cycles_inside_functions_and_for_the_type_checker_are_found() -> None:
    texts = {
        "moesim.a.b.x": "def f():\n    from moesim.a.c import y\n",
        "moesim.a.c.y": "if TYPE_CHECKING:\n    from moesim.a.d.z import name\n",
        "moesim.a.d.z": "import moesim.a.b.x\n",
        "moesim.a.e": "from moesim.a.d import z\n",
    }
    assert cycles(graph_of(texts)) == [["moesim.a.b.x", "moesim.a.c.y", "moesim.a.d.z"]]
