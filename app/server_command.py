"""Starts the dashboard's server, with one list of settings for the command, tests and scripts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import READ_BELOW

ADDRESS = "127.0.0.1"
MAX_UPLOAD_MB = 4
"""Limit on one uploaded file but a trace, which is streamed to disk; most kinds have a lower one."""
MAX_MESSAGE_MB = 32
"""Limit on one message between page and server; the dashboard's largest chart is about 1 MB."""

SETTINGS: Mapping[str, str | int | bool] = {
    "server.address": ADDRESS,
    "server.headless": True,
    "server.fileWatcherType": "none",
    "server.enableCORS": True,
    "server.enableXsrfProtection": True,
    "server.enableStaticServing": False,
    "server.maxUploadSize": MAX_UPLOAD_MB,
    "server.maxMessageSize": MAX_MESSAGE_MB,
    "server.showEmailPrompt": False,
    "server.disconnectedSessionTTL": 120,
    "browser.gatherUsageStats": False,
    "client.showErrorDetails": "none",
    "client.toolbarMode": "viewer",
    "runner.magicEnabled": False,
    "logger.level": "warning",
    "logger.enableRich": False,  # a failed page is logged on stderr, not printed on stdout
    "global.developmentMode": False,
}
"""Settings of the server; they outrank environment variables and every config.toml of the machine."""

NEWER_SETTINGS: Mapping[str, object] = {"server.allowedHosts": [ADDRESS, "localhost"]}
"""Settings against DNS rebinding that older releases of the framework do not know."""

ENVIRONMENT: Mapping[str, str] = {"MALLOC_ARENA_MAX": "2"}
"""Makes the allocator return memory that threads free to the system instead of caching it per thread."""


def check_extra() -> None:
    """Raise InputError where a package that the dashboard needs is not installed."""
    missing = [name for name in ("streamlit", "plotly") if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the dashboard needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install 'moesim[dashboard]'"
        )


def chosen_port(port: int) -> int:
    """`port` if it is free on this machine, or any free port for 0; raises InputError where it is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name != "nt":  # a port that is only waiting out its last connection counts as free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise InputError(
                f"--port {port}: {ADDRESS}:{port} cannot be used ({error.strerror}); stop what listens "
                "there, or give another port (0 takes any free one)"
            ) from None
        return int(probe.getsockname()[1])


def command(port: int) -> list[str]:
    """The command line of the server process."""
    return [sys.executable, "-P", "-m", "moesim.app.server_process", str(port)]


def url(port: int) -> str:
    """The address of the dashboard on this machine."""
    return f"http://{ADDRESS}:{port}"


def healthy(port: int) -> bool:
    """Whether the server answers."""
    # Connect directly, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url(port)}/_stcore/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def running(port: int, *, quiet: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server as a child process with its own upload folder; stop it and remove the folder at the end.

    Its files are readable for this user only. `quiet` hides the framework's greeting; errors still appear on
    stderr. The server also stops when this process ends in any other way, because its standard input is then
    closed.
    """
    folder = tempfile.mkdtemp(prefix="moesim-uploads-")
    process = subprocess.Popen(
        command(port),
        env={**os.environ, **ENVIRONMENT, READ_BELOW: folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if quiet else None,
        start_new_session=True,  # Ctrl-C comes to us alone, and we stop it
    )
    try:
        yield process
    finally:
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, limit_s: float = 120.0) -> bool:
    """Wait for the first answer; False where the process ended or the time is up."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        if healthy(port):
            return True
        time.sleep(0.1)
    return False


def stop(process: subprocess.Popen[bytes], limit_s: float = 10.0) -> None:
    """End the server: send SIGTERM first, then kill it after `limit_s`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()
