"""No process that the tree starts imports what lies in the current folder: a folder of scenarios is data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hwmodels", "simulator", "kernels", "app", "src/moesim/cli", "benchmarks", "examples")
STARTER = ROOT / "simulator" / "common" / "processes.py"
"""The one file that starts worker processes; its context keeps the current folder off their path."""

WORKERS = {"ProcessPoolExecutor", "get_context", "Process", "Pool", "Manager", "set_start_method", "spawn"}
"""Calls that start Python processes in multiprocessing, concurrent.futures and torch.multiprocessing."""
SHELLS = {"system", "popen", "posix_spawn", "posix_spawnp"} | {
    f"{verb}{ending}"
    for verb in ("exec", "spawn")
    for ending in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")
}
"""Calls of `os` that start a process without a list of arguments that this rule could read."""


STARTS = re.compile(
    rf"executable|[\"'][^\"'\n]*python|\bshell\s*=|\b(?:{'|'.join(WORKERS)})\b|\bos\.(?:{'|'.join(SHELLS)})\b"
)
"""What a file holds that starts any process; others are not parsed."""


def is_python(node: ast.expr) -> bool:
    """Whether an argument is the interpreter: `sys.executable`, or a text that names Python."""
    if isinstance(node, ast.Attribute):
        return node.attr == "executable" and isinstance(node.value, ast.Name) and node.value.id == "sys"
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return Path(text).name.startswith("python") and " " not in text


def unsafe(tree: ast.AST, own_context: bool = False) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of everything that starts Python with the current folder on its path.

    A script, `[sys.executable, __file__]`, is fine: Python puts the script's own folder first.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            for first, second in zip(node.elts, node.elts[1:], strict=False):
                option = second.value if isinstance(second, ast.Constant) else ""
                if is_python(first) and isinstance(option, str) and option[:1] == "-" and option != "-P":
                    yield node.lineno, f"{option} must come after -P"
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
            if (
                not own_context
                and name in WORKERS
                and of in ("", "multiprocessing", "mp", "concurrent", "futures")
            ):
                yield node.lineno, f"{name}: start workers with worker_pool"
            if of == "os" and name in SHELLS:
                yield node.lineno, f"os.{name}: use subprocess with a list"
            for word in node.keywords:
                if word.arg == "shell" and not (
                    isinstance(word.value, ast.Constant) and not word.value.value
                ):
                    yield node.lineno, "shell=True: use a list"


def test_nothing_starts_python_with_the_current_folder_on_its_path() -> None:
    checked, found = 0, []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            safe = path == STARTER or 'os.environ["PYTHONSAFEPATH"] = "1"' in text
            checked += 1
            if not STARTS.search(text):
                continue
            found += [f"{path.relative_to(ROOT)}:{n}: {why}" for n, why in unsafe(ast.parse(text), safe)]
    assert checked > 400 and not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        'Popen([sys.executable, "-m", "moesim.app.server_process"])',
        'command = ["python3", "-c", "pass"]',
        "ProcessPoolExecutor(4)",
        'multiprocessing.get_context("spawn")',
        "mp.spawn(f)",
        'os.system("python x.py")',
        'subprocess.run("ls", shell=True)',
    ],
)
def test_what_would_run_the_current_folder_is_told(text: str) -> None:
    assert list(unsafe(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        'Popen([sys.executable, "-P", "-m", "moesim.app.server_process"])',
        "command = [sys.executable, __file__, str(path)]",
        'subprocess.run(["nvidia-smi", "-q"])',
        "worker_pool(4)",
    ],
)
def test_what_does_not_passes(text: str) -> None:
    assert not list(unsafe(ast.parse(text)))
