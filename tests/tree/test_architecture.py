"""Rules about the tree itself: sizes, names, imports, equations, and nothing of anybody's machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("simulator", "hwmodels", "kernels", "app", "src")
OURS = (*CODE, "tests", "benchmarks", "examples", "docs")
PARTS = ("simulator", "hwmodels", "kernels", "app")

MOST_LINES = 600
"""One concept, one file: a file is split when it holds two concepts. This many lines rarely hold one."""

MOST_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {
    "src/moesim/cli/import_launch.py: import_launch": "two thirds of it are the options with their help",
    "src/moesim/cli/plan.py: plan": "two thirds of it are the options of the command with their help",
    "src/moesim/cli/simulate.py: simulate": "half of it are the options of the command with their help",
    "src/moesim/cli/studies.py: sweep": "half of it are the options of the command with their help",
}
"""Functions above the limit, each with its reason. A new one is split or argues for itself here."""

SAME_NAMES: dict[str, str] = {}
"""Classes of one name in two places, each with its reason."""


@cache
def tracked() -> tuple[str, ...]:
    """Every file under version control; everything below our folders where there is no repository."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(ROOT)) for folder in OURS for path in (ROOT / folder).rglob("*.*")]
    return tuple(name for name in listed if name and (ROOT / name).is_file())


def python_files(*folders: str) -> list[str]:
    of_folders = [n for n in tracked() if n.endswith(".py") and n.split("/")[0] in folders]
    return [n for n in of_folders if not (ROOT / n).is_symlink()]


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@cache
def definitions_of(name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes of a file; statements alone hold any, so expressions are not looked at."""
    waiting: list[ast.AST] = [ast.parse(text_of(name))]
    found = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            waiting += inner if isinstance(inner, list) else []
    return found


# -- size --------------------------------------------------------------------------------------------


def test_no_source_file_is_longer_than_its_limit() -> None:
    long = [n for n in python_files(*OURS) if len(text_of(n).splitlines()) > MOST_LINES]
    assert not long, f"these hold more than one concept: {long}"


def test_functions_are_short_or_say_why_not() -> None:
    long = {
        f"{name}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name in python_files(*CODE)
        for node in definitions_of(name)
        if not isinstance(node, ast.ClassDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
    }
    unexplained = {place: lines for place, lines in long.items() if place not in LONG_FUNCTIONS}
    assert not unexplained, f"split or explain: {unexplained}"
    assert set(LONG_FUNCTIONS) <= set(long), f"short by now: {sorted(set(LONG_FUNCTIONS) - set(long))}"
    assert all(reason.strip() for reason in LONG_FUNCTIONS.values())


# -- names -------------------------------------------------------------------------------------------


def test_every_class_name_stands_once() -> None:
    """A name in a message, a traceback or a search means one thing."""
    every = [node for name in python_files(*CODE) for node in definitions_of(name)]
    count = Counter(node.name for node in every if isinstance(node, ast.ClassDef))
    twice = {name for name, places in count.items() if places > 1}
    assert twice <= set(SAME_NAMES), f"rename: {sorted(twice - set(SAME_NAMES))}"
    assert set(SAME_NAMES) <= twice, f"stand once by now: {sorted(set(SAME_NAMES) - twice)}"


ARRAY_ALIAS = re.compile(r"NDArray\[np\.(?:float64|int64|bool_)\]")


def test_array_types_have_one_name() -> None:
    """`FloatArray`, `IntArray` and `BoolArray` of hwmodels/arrays.py, and no second name beside them."""
    found = {name for name in python_files(*CODE) if ARRAY_ALIAS.search(text_of(name))}
    assert found == {"hwmodels/arrays.py"}


# -- imports -----------------------------------------------------------------------------------------


SHORT_IMPORT = re.compile(rf"^\s*(?:from|import) +(?:\.|(?:{'|'.join(PARTS)})\b).*", re.MULTILINE)


def test_parts_are_imported_by_their_full_name() -> None:
    """A top-level `kernels` or `app` belongs to somebody else on a user's machine."""
    found = [
        f"{name}: {line}" for name in python_files(*OURS) for line in SHORT_IMPORT.findall(text_of(name))
    ]
    assert not found, f"import moesim.PART, and by the full name: {found}"
    assert SHORT_IMPORT.search("import app.x") and SHORT_IMPORT.search("    from .cost import a")
    assert not SHORT_IMPORT.search("import application\nfrom moesim.app import x")


def test_hidden_imports_do_not_go_around_the_layers() -> None:
    """import-linter follows import statements; a name in a string it cannot see."""
    for name in python_files("simulator", "hwmodels", "kernels"):
        for call in re.findall(r"import_module\(\s*[\"']([^\"']+)", text_of(name)):
            part, target = name.split("/")[0], call.removeprefix("moesim.").split(".")[0]
            assert target == part or target not in PARTS, f"{name} reaches {call} around the layers"


# -- equations ---------------------------------------------------------------------------------------

CITATION = re.compile(r"[Ee]qs?\.\s+([A-Z]\d+[a-z]?(?:(?:,\s*|\s+(?:and|to)\s+)[A-Z]\d+[a-z]?)*)")
LABEL = re.compile(r"^ {4}.*\(eq\. ([A-Z]\d+[a-z]?)\)$", re.MULTILINE)
"""A label stands at the end of an indented equation; mentions in sentences are no labels."""


def cited(text: str) -> set[str]:
    """Labels of equations in a text: "eq. X2", "eqs. E1, E2 and E4", "eqs. F4 to F6" as well."""
    joined = re.sub(r"\s*\n\s*(?:#\s*)?", " ", text)
    found: set[str] = set()
    for group in CITATION.findall(joined):
        labels = re.findall(r"[A-Z]\d+[a-z]?", group)
        found |= set(labels)
        for first, last in re.findall(r"([A-Z]\d+)\s+to\s+([A-Z]\d+)", group):
            found |= {f"{first[0]}{n}" for n in range(int(first[1:]), int(last[1:]) + 1)}
    return found


def model_chapters() -> dict[str, str]:
    """Text of docs/model.md, the table of contents, and of its chapters, by path below docs/."""
    folder = ROOT / "docs"
    if not (folder / "model.md").exists():
        pytest.skip("docs/model.md is not there")
    pages = [folder / "model.md", *sorted((folder / "model").glob("*.md"))]
    return {str(page.relative_to(folder)): page.read_text("utf-8") for page in pages}


def model_page() -> str:
    return "\n".join(model_chapters().values())


def citations() -> dict[str, set[str]]:
    """Label to the source files that cite it."""
    found: dict[str, set[str]] = {}
    for name in python_files("simulator", "hwmodels"):
        for label in cited(text_of(name)):
            found.setdefault(label, set()).add(name)
    return found


def test_citations_are_read_in_every_form() -> None:
    assert cited("(docs/model.md, eq. X2)") == cited("Eq. X2: t = 1") == {"X2"}
    assert cited("eqs. E1, E2 and\n    E4") == {"E1", "E2", "E4"}
    assert cited("eqs. F4 to F6; eq. B1") == {"F4", "F5", "F6", "B1"}
    assert cited("see eq. 7") == set()


def test_every_cited_equation_exists() -> None:
    labels = set(LABEL.findall(model_page()))
    unknown = {label: sorted(names) for label, names in citations().items() if label not in labels}
    assert not unknown


def test_every_equation_is_cited_by_the_code_that_holds_it() -> None:
    labels = LABEL.findall(model_page())
    assert len(set(labels)) == len(labels), "a label stands twice"
    assert len(labels) > 20
    assert sorted(set(labels) - set(citations())) == []


def test_tests_named_in_the_model_page_exist() -> None:
    defined = {
        node.name
        for name in python_files("tests")
        for node in definitions_of(name)
        if isinstance(node, ast.FunctionDef)
    }
    named = set(re.findall(r"`(test_\w+)`", model_page()))
    assert sorted(named - defined) == []


def labels_of(cell: str) -> set[str]:
    """Labels that a row of the table of contents names: "C4 to C10, H2", "T1 and T2"."""
    found = set(re.findall(r"[A-Z]\d+[a-z]?", cell))
    for letter, first, last in re.findall(r"([A-Z])(\d+) to \1(\d+)(?![a-z\d])", cell):
        found |= {f"{letter}{n}" for n in range(int(first), int(last) + 1)}
    for stem, first, last in re.findall(r"([A-Z]\d+)([a-z]) to \1([a-z])", cell):
        found |= {f"{stem}{chr(n)}" for n in range(ord(first), ord(last) + 1)}
    return found


def test_the_table_of_contents_says_which_chapter_holds_an_equation() -> None:
    chapters = model_chapters()
    rows = re.findall(r"^\| \[.*?\]\((model/.*?)\) \|.*\| (.*?) \|$", chapters["model.md"], re.MULTILINE)
    assert {page: labels_of(cell) for page, cell in rows} == {
        page: set(LABEL.findall(text)) for page, text in chapters.items() if page != "model.md"
    }


NAMED = re.compile(r"((?:`[\w.]+`(?:,| and|;)? ?(?:\([^)]*\) ?)?)+)[^`;]{0,20}? ?in `([\w/]+)`")


def defined_in(folder: str) -> set[str]:
    """Functions, classes and methods ("Class.method") that the files of a folder define."""
    found: set[str] = set()
    for name in tracked():
        if name.startswith(f"{folder}/") and name.endswith(".py"):
            for node in ast.parse(text_of(name)).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                if isinstance(node, ast.ClassDef):
                    found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def test_functions_named_in_the_model_page_exist() -> None:
    joined = " ".join(model_page().split())
    named = [
        (name, folder)
        for code in re.findall(r"Code: (.*?)(?:\. |\.$)", joined)
        for names, folder in NAMED.findall(code)
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    assert len(named) > 100
    places = {folder: defined_in(folder) for folder in {folder for _, folder in named}}
    assert [(name, folder) for name, folder in named if name not in places[folder]] == []


# -- nothing of anybody's machine --------------------------------------------------------------------

MACHINE_PATH = re.compile(r"(?<![\w.~/<>-])/(?:work|home|root|Users|farm|mnt|private|scratch)/[\w.-]+")


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for name in tracked():
        path = ROOT / name
        if path.is_symlink():
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match}" for match in MACHINE_PATH.findall(text)]
    assert found == []


def test_the_path_check_finds_what_it_looks_for() -> None:
    # Written in two halves, or this file would be found itself.
    first, second = "/wo" + "rk/main", "/ho" + "me/me"
    text = f"see {first}/x.py and {second}, not a/home/b, </work>, /tmp/x"
    assert MACHINE_PATH.findall(text) == [first, second]


SOURCE = re.compile(r"(?<![\w./])([A-Za-z0-9-]+/[A-Za-z0-9_.-]+)@[0-9a-f]{6,}")


def test_notice_names_every_repository_that_data_and_code_cite() -> None:
    notice = text_of("NOTICE")
    cited_ones = {
        source
        for name in tracked()
        if name.split("/")[0] in ("hwmodels", "simulator", "kernels")
        and name.endswith((".yaml", ".csv", ".py"))
        for source in SOURCE.findall(text_of(name))
    }
    assert len(cited_ones) > 20
    missing = {
        s for s in cited_ones if s not in notice and not (s.startswith("deepseek-ai/") and s[12:] in notice)
    }
    assert missing == set()


PAGES = [name for name in tracked() if name.endswith(".md")]
WRITTEN_INTO = {
    "lab/docs/kernels-notes.md": "docs",
    "lab/docs/scoreboard-notes.md": "docs",
    "lab/docs/validation-notes.md": "docs",
    "lab/docs/serving-notes.md": "docs/validation",
}
"""Texts whose links are those of the page that a writer puts them on, by its folder."""


def test_links_between_pages_are_alive() -> None:
    dead = []
    for page in PAGES:
        folder = ROOT / WRITTEN_INTO[page] if page in WRITTEN_INTO else (ROOT / page).parent
        targets = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page))}
        local = [t for t in targets if t and not t.startswith(("http", "mailto"))]
        dead += [f"{page}: {target}" for target in local if not folder.joinpath(target).exists()]
    assert not dead
