"""The command `app`: opens the dashboard in a browser, for this machine only."""

from __future__ import annotations

import signal
import webbrowser
from types import FrameType
from typing import Annotated

import typer

from moesim.hwmodels.errors import MoesimError


class ServerError(MoesimError):
    """The dashboard's server process ended unexpectedly."""

    exit_code = 1


def dashboard(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any free one.", min=0, max=65535)] = (
        8501
    ),
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """Open the dashboard in a browser; Ctrl-C stops it.

    It listens on this machine only, fetches nothing from the internet and reads no file by path.
    """
    from moesim.app import server_command

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    server_command.check_extra()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server process must not outlive this one
        signal.signal(number, stop)
    port = server_command.chosen_port(port)
    with server_command.running(port) as process:
        try:
            if server_command.wait_until_healthy(process, port):
                typer.echo(
                    f"moesim: the dashboard is at {server_command.url(port)} (Ctrl-C stops it)", err=True
                )
                if not no_browser:
                    webbrowser.open(server_command.url(port))
                process.wait()
        except KeyboardInterrupt:
            typer.echo("moesim: stopped", err=True)
            return
        raise ServerError(f"the dashboard's server ended by itself (exit code {process.poll()})")
