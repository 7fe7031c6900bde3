"""What the study scripts of host and memory share before PyTorch is imported: environment, packages, options.

A study runs as a file on a machine that need not have what moesim's packages import. Its first lines are

    if __name__ == "__main__" and not __package__:
        importlib.import_module("study_setup").prepare()
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path

LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
"""The driver's and the runtime's calls with which a host gives work to a GPU, as a profiler names them."""
PACKAGES = ("moesim", "moesim.kernels", "moesim.kernels.calibrate", "moesim.kernels.calibrate.studies")


def prepare(**environment: str) -> None:
    """Switch NVLink multicast off, set more of the environment, and stand in for moesim's packages.

    Values that the environment has already stay. Every package points at the folder of the studies, so that
    they can import each other by their full names.
    """
    settings = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", **environment}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(__file__).resolve().parent)]
        sys.modules[name] = package


def parser(budget_s: float) -> argparse.ArgumentParser:
    """The options of every study; `budget_s` is the default of the time that it may take."""
    options = argparse.ArgumentParser()
    options.add_argument("--dry", action="store_true")
    options.add_argument("--out", default=".")
    options.add_argument("--budget", type=float, default=budget_s)
    options.add_argument("--only", default="", help="texts, one of which a case's name has, between commas")
    return options
