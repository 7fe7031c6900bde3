"""What the study scripts of host and memory share before PyTorch is imported: environment, packages, options.

A study sets its environment before it imports PyTorch:

    if __name__ == "__main__":
        study_setup.prepare()
"""

from __future__ import annotations

import argparse
import os


def prepare(**environment: str) -> None:
    """Switch NVLink multicast off, and set more of the environment.

    Values that the environment has already stay.
    """
    settings = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", **environment}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def parser(budget_s: float) -> argparse.ArgumentParser:
    """The options of every study; `budget_s` is the default of the time that it may take."""
    options = argparse.ArgumentParser()
    options.add_argument("--dry", action="store_true")
    options.add_argument("--out", default=".")
    options.add_argument("--budget", type=float, default=budget_s)
    options.add_argument("--only", default="", help="texts, one of which a case's name has, between commas")
    return options
