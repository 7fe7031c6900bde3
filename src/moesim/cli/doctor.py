"""The findings of the command `doctor`: versions, engine, data files, GPU and toolkit. Nothing is started."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import moesim

PACKAGES = (
    "simpy", "numba", "llvmlite", "numpy", "networkx", "pydantic", "typer", "rich", "pyyaml",
    "streamlit", "plotly", "distributed", "nvidia-ml-py",
)  # fmt: skip
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


def findings() -> dict[str, str]:
    """Names and values that matter for a bug report."""
    from moesim.hwmodels.calibration import list_profiles
    from moesim.hwmodels.cluster import list_clusters
    from moesim.simulator.engine.registry import engine_report
    from moesim.simulator.model.catalogue import shipped_models
    from moesim.simulator.scenario import preset_names
    from moesim.simulator.studies import result_cache

    found = {
        "moesim": moesim.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    found |= {name: _installed(name) or "not installed" for name in PACKAGES}
    found["cupy"] = next((f"{v} ({name})" for name in CUPY if (v := _installed(name))), "not installed")
    found |= engine_report()
    folder = result_cache.folder()
    kept = (
        f"off ({result_cache.FOLDER}=off)" if folder is None else result_cache.check() or f"{folder}: works"
    )
    found |= {
        "kept predictions": kept,
        "presets": ", ".join(preset_names()),
        "models": f"{len(shipped_models())} (moesim models)",
        "clusters": ", ".join(list_clusters()),
        "calibration profiles": ", ".join(list_profiles()),
        "GPU": _gpus(),
        "ptxas": shutil.which("ptxas") or "not found (only kernel work needs it)",
    }
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpus() -> str:
    """Devices and driver, read with the CUDA driver library itself, so that no package is needed."""
    none = "none found (simulation needs none)"
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return none
    count, supported = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return none
    driver.cuDriverGetVersion(ctypes.byref(supported))
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGetName(name, len(name), 0)
    cuda = f"{supported.value // 1000}.{supported.value % 1000 // 10}"
    ready = "CuPy can be used" if importlib.util.find_spec("cupy") else "CuPy is not installed"
    return f"{count.value} x {name.value.decode()}, driver supports CUDA {cuda}; {ready}"
