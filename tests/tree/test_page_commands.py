"""Every command in a code block of a page runs (on a smaller step); those within sentences are parsed."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from megatron_launches import MIXTRAL

from moesim.cli import app, main
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        str(page.relative_to(ROOT))
        for pattern in ("*.md", "model/*.md")
        for page in sorted((ROOT / "docs").glob(pattern))
    ),
)
RECIPES = "docs/extend.md"
"""Its code blocks are files of recipes, which tests/extend writes into a copy of the tree and runs there."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:moesim|make|python (?:benchmarks/|-m lab\.))[^`\n]*)`")
HOME = "deepseek-v3-2048xh800"

PARSED_ONLY = {
    "app": "starts a server: tests/app/e2e",
    "calibrate": "measures GPUs for minutes: tests/kernels/test_calibrate_gpu.py",
    "validate": "minutes with --all (make scoreboard); its rows are docs/validation.md's: test_pages.py",
}
"""Commands that are not run here, and why; that they parse is tested all the same."""

SMALLER: dict[str, list[str]] = {
    "simulate": ["batch.sequences=4096"],
    "explain": ["batch.sequences=4096"],
    "compare": ["batch.sequences=4096"],
    "sweep": ["batch.sequences=4096"],
    "sensitivity": ["batch.sequences=4096"],
    "run": ["run.replicas=20"],
    "plan": ["batch.sequences=4096"],
}
"""What makes a command on the home case small: fewer micro-batches or repetitions."""

FEWER = {"--engine-draws": "20"}
"""Options that take fewer here than on the page."""

FULL = [
    "model=qwen3-30b-a3b", "cluster.nodes=32", "parallel.pp=4", "parallel.ep=64", "batch.sequences=512",
]  # fmt: skip
"""What makes full resolution small: 256 GPUs on the same network."""

SPACES = {
    HOME: "{tp: [1], pp: [16], ep: [64], recompute: [deepseek-v3], sms: [20], schedule: [dualpipe]}",
    "my.yaml": "{tp: [1], pp: [4], ep: [8], recompute: [full], schedule: [1f1b], microbatch: [1]}",
    "examples/mixed.yaml": "{tp: [1], pp: [4], ep: [8], recompute: [full], schedule: [1f1b]}",
}
"""A short space for every scenario that a page plans."""


def moesim_commands(text: str) -> Iterator[str]:
    """The `moesim ...` lines of a page's code blocks, without comments."""
    for language, block in FENCED.findall(text):
        if language in ("", "sh", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.sub(r"\s+#.*", "", line).split("; "):
                    if part.strip().startswith("moesim "):
                        yield " ".join(part.split())


def moesim_spans(text: str) -> Iterator[str]:
    """Those in sentences: a command and perhaps a part of its arguments."""
    for span in INLINE.findall(FENCED.sub("", text)):
        if re.match(r"moesim [a-z]+", span) and not re.search(r"\.\.\.|[A-Z]{3}|<", span):
            yield " ".join(span.split())


def by_page(find: Callable[[str], Iterator[str]]) -> list[tuple[str, str]]:
    """(page, command), each command once."""
    found: dict[str, str] = {}
    for page in PAGES:
        for command in find((ROOT / page).read_text("utf-8")):
            found.setdefault(command, page)
    return [(page, command) for command, page in found.items()]


COMMANDS, SPANS = by_page(moesim_commands), by_page(moesim_spans)


def smaller(arguments: list[str]) -> list[str]:
    """The arguments with what keeps the test short."""
    command, more = arguments[0], list[str]()
    arguments = [FEWER.get(option, word) for option, word in zip(["", *arguments], arguments, strict=False)]
    if "full" in arguments:
        more = FULL
    elif HOME in arguments:
        more = SMALLER.get(command, [])
    result = [*arguments, *(word for change in more for word in ("--set", change))]
    if command == "plan":
        Path("short.yaml").write_text(SPACES[arguments[1]])
        sized = any(word.startswith(("--accelerators", "cluster.")) for word in arguments)
        result += ["--space", "short.yaml", "--workers", "1", *(() if sized else ("--top", "1"))]
    return [*result, "--workers", "1"] if command == "sweep" else result


def parse(arguments: list[str]) -> int:
    """The exit code of reading arguments as the command line does, with every command emptied."""
    root = typer.main.get_command(app)
    emptied(root)
    with pytest.raises(SystemExit) as end:
        root(args=arguments, prog_name="moesim")
    return int(end.value.code or 0)


def emptied(command: Any) -> None:
    """Leave a command its options and take what it does, also where a group makes its commands when asked."""
    command.callback = None
    if not hasattr(command, "list_commands"):
        return
    inner = {name: command.get_command(None, name) for name in command.list_commands(None)}
    for each in inner.values():
        emptied(each)
    command.get_command = lambda ctx, name: inner.get(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages speak of, by the names that they give them."""
    place = tmp_path_factory.mktemp("pages")
    golden, fixtures = ROOT / "tests" / "golden", ROOT / "tests" / "kernels" / "importer_fixtures"
    (place / "path" / "to").mkdir(parents=True)
    for target in ("config.json", "path/to/config.json"):
        shutil.copy(golden / "models" / "qwen3-30b-a3b.json", place / target)
    shutil.copytree(ROOT / "examples", place / "examples")
    small = (golden / "scenario-small.yaml").read_text("utf-8")
    (place / "my.yaml").write_text(small.replace("1.0e+12", "1.0e+11"))
    shutil.copy(fixtures / "all_gather.txt", place / "all_gather.txt")
    shutil.copy(fixtures / "deepep_first_intranode.txt", place / "log.txt")
    (place / "nccl.xml").write_text(nccl_xml())
    (place / "counts.csv").write_text(",".join(str(64 + 8 * (n % 7)) for n in range(256)) + "\n")
    (place / "space.yaml").write_text(SPACES[HOME])
    (place / "run.sh").write_text(
        "torchrun pretrain_gpt.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
        "--expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 "
        "--bf16\n"
    )
    (place / "train.sh").write_text(
        "torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py " + " ".join(MIXTRAL.split()) + "\n"
    )
    trainers = FENCED.findall((ROOT / "docs" / "trainers.md").read_text("utf-8"))
    (place / "site.yaml").write_text(next(block for _, block in trainers if block.startswith("partition:")))
    printed = ROOT / "tests" / "simulator" / "trainers" / "reading" / "printed"
    shutil.copy(printed / "megatron-core-0.14.0.log", place / "train.log")
    (place / "zoo.yaml").write_text(
        "ENV_VARS: {NCCL_DEBUG: VERSION}\nMODEL_ARGS:\n  --tensor-model-parallel-size: ${TP}\n"
        "  --pipeline-model-parallel-size: ${PP}\n  --expert-model-parallel-size: 64\n"
        "  --sequence-parallel: true\n  --use-distributed-optimizer: true\n  --bf16: true\n"
        "  --expert-tensor-parallel-size: 1\n  --decoder-last-pipeline-num-layers: 1\n"
    )
    return place


def nccl_xml() -> str:
    """Two GPUs behind one NVSwitch, each with a NIC of its own."""
    link, pci = 'link_speed="32.0 GT/s PCIe" link_width="16"', "0000:0"
    parts = [
        f'<pci busid="{pci}{4 * n + 1}:00.0" class="0x060400" {link}>'
        f'<pci busid="{pci}{4 * n + 2}:00.0" class="0x030200" {link}><gpu dev="{n}" sm="90" rank="{n}">'
        f'<nvlink target="{pci}9:00.0" count="18" tclass="0x068000"/></gpu></pci>'
        f'<pci busid="{pci}{4 * n + 3}:00.0" class="0x020700" {link}><nic>'
        f'<net name="mlx5_{n}" dev="{n}" speed="400000" port="1" gdr="1"/></nic></pci></pci>'
        for n in range(2)
    ]
    cpu = '<cpu numaid="0" arch="x86_64" vendor="GenuineIntel">'
    return f'<system version="1">{cpu}{"".join(parts)}</cpu></system>'


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[c for _, c in COMMANDS])
def test_a_command_of_a_page_runs(
    page: str,
    command: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "here"))
    arguments = shlex.split(command)[1:]
    assert parse(list(arguments)) == 0, f"{page}: {command}: {capsys.readouterr().err}"
    if arguments[0] in PARSED_ONLY:
        return
    with pytest.raises(SystemExit) as end:
        main(smaller(arguments))
    shown = capsys.readouterr()
    assert end.value.code == 0, f"{page}: {command}: {shown.err}"
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(("page", "span"), SPANS, ids=[s for _, s in SPANS])
def test_a_command_in_a_sentence_parses(page: str, span: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = parse(shlex.split(span)[1:])
    shown = capsys.readouterr().err
    assert code == 0 or "Missing argument" in shown or "Missing option" in shown, f"{page}: {span}: {shown}"


def test_pages_hold_commands_and_the_parser_refuses_what_does_not_exist() -> None:
    assert len(COMMANDS) >= 40 and len(SPANS) >= 10
    for wrong in (["simulat"], ["simulate", HOME, "--sett", "x=1"], ["import", "hff", "x"]):
        assert parse(wrong) == 2


def test_make_targets_and_benchmarks_of_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        spans = [
            *INLINE.findall(text),
            *re.findall(r"^(make [a-z]+|python (?:benchmarks/|-m lab\.)\S+.*)", text, re.MULTILINE),
        ]
        for span in spans:
            words = span.split()
            if words[0] == "make" and len(words) > 1:
                assert words[1] in targets, f"{page}: {span}"
            if words[0] == "python":
                module = words[1] == "-m"
                script = ROOT / (f"{words[2].replace('.', '/')}.py" if module else words[1])
                assert script.is_file(), f"{page}: {span}"
                for option in (word for word in words if word.startswith("--")):
                    assert f'"{option}"' in script.read_text("utf-8"), f"{page}: {span}"


def python_blocks() -> list[tuple[str, str]]:
    return [
        (page, block)
        for page in PAGES
        for language, block in FENCED.findall((ROOT / page).read_text("utf-8"))
        if language == "python" and page != RECIPES
    ]


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_python_on_a_page_runs(page: str, block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines on the smaller scenario of the tests."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])
    assert HOME in block or page != "README.md"
    small = block.replace(f'"{HOME}"', '"my.yaml"').replace("PlanSpace(", "PlanSpace(pp=(4,), ep=(8,), ")
    exec(compile(small, page, "exec"), {"__name__": "page"})


YAML = [
    (page, block)
    for page in PAGES
    for language, block in FENCED.findall((ROOT / page).read_text("utf-8"))
    if language == "yaml" and block.startswith("name:") and page != RECIPES
]


@pytest.mark.parametrize(("page", "block"), YAML)
def test_yaml_on_a_page_is_legal(page: str, block: str) -> None:
    data: Any = parse_mapping(block, page)
    model: type[Scenario] | type[ModelShape] = ModelShape if "n_layers" in data else Scenario
    validate_model(model, data, page)
