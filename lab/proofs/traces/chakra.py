"""Chakra's own tools on our execution traces: its feeder to the end, its jsonizer and its visualizer.

    python -m lab.proofs.traces.chakra --tree TREE --python PYTHON --protobuf PREFIX FILE.et...

TREE is a checkout of mlcommons/chakra, PYTHON has grpcio-tools, graphviz and networkx, PREFIX holds protobuf's
bin/protoc, include and lib (such as unpacked libprotobuf-dev, libprotobuf32, libprotoc32, protobuf-compiler).
The feeder is C++; `feed.cpp` beside this file issues every node as a simulator does. A last check is ours: the
feeder drops a dependency on a node that is missing only by never ending, so all nodes must have been issued.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def built(tree: Path, python: str, prefix: Path, work: Path) -> tuple[Path, dict[str, str]]:
    """The feeder's driver, and the environment of Chakra's Python tools, in a folder of its own."""
    proto = tree / "schema" / "protobuf"
    library = next(prefix.glob("lib/**/libprotobuf.so*")).parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(work)}
    protoc = [str(prefix / "bin" / "protoc"), f"-I{proto}", f"--cpp_out={work}", str(proto / "et_def.proto")]
    subprocess.run(protoc, env=environment, check=True)
    utilities = tree / "src" / "third_party" / "utils"
    sources = [
        Path(__file__).with_name("feed.cpp"), tree / "src/feeder/et_feeder.cpp",
        tree / "src/feeder/et_feeder_node.cpp", utilities / "protoio.cc", work / "et_def.pb.cc",
    ]  # fmt: skip
    folders = (work, prefix / "include", tree / "src/feeder", utilities)
    libraries = [f"-L{library}", f"-l:{next(library.glob('libprotobuf.so.*')).name}", "-lz"]
    subprocess.run(
        ["g++", "-O1", "-w", "-std=c++17", *(f"-I{folder}" for folder in folders), *map(str, sources),
         *libraries, "-o", str(work / "feed")], check=True,
    )  # fmt: skip
    package = work / "chakra" / "schema" / "protobuf"
    package.mkdir(parents=True)
    shutil.copytree(tree / "src", work / "chakra" / "src")
    subprocess.run(
        [python, "-m", "grpc_tools.protoc", f"-I{proto}", f"--python_out={package}", "et_def.proto"],
        check=True,
    )
    return work / "feed", environment


def main() -> int:
    """Run all three on every file; the exit code is 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for name in ("tree", "python", "protobuf"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        feed, environment = built(Path(args.tree), args.python, Path(args.protobuf), work)
        bad = subprocess.run([str(feed), *map(str, args.files)], env=environment).returncode
        for file in args.files:
            for tool, ending in (("jsonizer.jsonizer", "json"), ("visualizer.visualizer", "graphml")):
                out = work / f"out.{ending}"
                command = [args.python, "-m", f"chakra.src.{tool}", "--input_filename", str(file)]
                done = subprocess.run([*command, "--output_filename", str(out)], env=environment, cwd=work)
                bad += done.returncode
                count = out.read_text().count('"type"' if ending == "json" else "<node ")
                print(f"{file.name}: {tool} {'failed' if done.returncode else f'{count} nodes'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
