"""The single-threaded process that job processes are forked from; it imports the simulator once, and predicts
the home case once, so that every job starts with the parts and the compiled engine that predictions share.

`jobs` starts it as `python -m moesim.app.job_server SOCKET`. It never reads the dashboard's script, which
`multiprocessing` would import again in every child. It ends, with all jobs, when its standard input is
closed, which happens however the dashboard's process ends.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import moesim
from moesim.app import jobs
from moesim.app.pages import HOME
from moesim.hwmodels.errors import InputError, MoesimError

IDLE_S, RETRY_S, TRIES = 0.3, 5.0, 36
"""Seconds without a new job before the home case is predicted, and until compiled code is looked for again;
how often that is done."""

log = logging.getLogger("moesim.app")


def serve(path: str) -> None:
    """Fork a process for every connection to the socket `path`, until standard input ends."""
    prepare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the dashboard, which stops us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children: the system removes them
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(path)
        except FileNotFoundError:
            return  # whoever started this has ended meanwhile
        listener.listen(64)
        tries, idle_s = TRIES, IDLE_S
        ahead: socket.socket | None = None
        while True:
            wait_s = idle_s if tries else IDLE_S if ahead is None else None
            ready, _, _ = select.select([listener, sys.stdin], [], [], wait_s)
            if not ready:
                if tries:
                    tries, idle_s = warm(tries), RETRY_S
                else:
                    ahead = _fork_ahead(listener)
                continue
            if sys.stdin in ready:
                os.killpg(0, signal.SIGKILL)
            taken, _ = listener.accept()
            given = False
            if ahead is not None and select.select([ahead], [], [], 0.0)[0]:
                given, ahead = _handed(ahead, taken), None
            if not given and os.fork() == 0:
                listener.close()
                _serve_one(taken)
            taken.close()


def _fork_ahead(listener: socket.socket) -> socket.socket:
    """A child that waits for the next job with pages of its own, which a fresh one copies as it computes.

    Returns the socket that takes the job's connection. The child says on it when it is ready.
    """
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        listener.close()
        ours.close()
        with suppress(Exception):  # a job meets the error again and shows it
            moesim.simulate(HOME).model_dump()
        with suppress(OSError):
            theirs.send(b"ready")
            taken = socket.recv_fds(theirs, 1, 1)[1]
            theirs.close()
            if taken:
                _serve_one(socket.socket(fileno=taken[0]))
        os._exit(0)
    theirs.close()
    return ours


def _handed(ahead: socket.socket, taken: socket.socket) -> bool:
    """Whether the child behind `ahead`, which said something or ended, took a connection."""
    with ahead, suppress(OSError):
        if ahead.recv(8):
            socket.send_fds(ahead, [b"1"], [taken.fileno()])
            return True
    return False


def _serve_one(taken: socket.socket) -> None:
    """Do the job of a connection and end this process."""
    with Connection(taken.detach()) as pipe:
        _run(pipe)
    try:
        jobs.finish_job()
    except Exception:  # the answer is sent already
        log.exception("what follows a job failed")
    os._exit(0)


def prepare() -> None:
    """Import and read what every child needs, and check once whether predictions can be stored."""
    import moesim.app.predictions
    from moesim.simulator.studies import result_cache

    assert moesim.app.predictions is not None
    result_cache.find(moesim.load(HOME))
    if result_cache.problem() is not None:
        log.warning("%s", result_cache.problem())


def warm(tries: int) -> int:
    """Predict the home case, while nobody waits, so that jobs inherit the parts that predictions share.

    Where the engine's code is still being compiled, this waits for it as long as `tries` lasts. Returns the
    tries that are left, 0 where there is nothing more to do.
    """
    from moesim.simulator.engine.registry import is_compiling

    try:
        if tries > 1 and is_compiling():
            return tries - 1
        moesim.simulate(HOME)
    except Exception:  # a job meets the error again and shows it
        log.exception("the home case could not be predicted ahead")
    gc.freeze()  # a collection in a child would otherwise copy every page that it shares with this process
    return 0


def _run(pipe: Connection) -> None:
    """Compute what the connection requests and send one value or one error."""
    try:
        pipe.send(("process", os.getpid()))
        niceness, budget_s, function, args = pipe.recv()
        os.nice(niceness)
        jobs.enforce(budget_s)
        wants_progress = "progress" in getattr(function, "__annotations__", {})
        value = pickle.dumps(function(*args, **({"progress": Sender(pipe)} if wants_progress else {})))
        if len(value) > jobs.VALUE_BYTES:
            size, most = (n / 1e6 for n in (len(value), jobs.VALUE_BYTES))
            raise InputError(
                f"the result has {size:,.0f} MB, more than the {most:.0f} MB that the dashboard shows; take "
                "fewer micro-batches or a smaller cluster, or use the command line"
            )
        pipe.send(("value", value))
    except InputError as error:
        pipe.send(("error", "InputError", str(error), error.key, error.nearest))
    except MoesimError as error:
        pipe.send(("error", type(error).__name__, str(error)))
    except MemoryError:
        limit = f"{jobs.JOB_BYTES / 1e9:.1f} GB"
        text = f"the computation needed more than its {limit} of memory and was stopped"
        pipe.send(("error", "JobError", text))
    except (EOFError, ConnectionError):
        return  # nobody wants it any more
    except Exception as error:
        log.exception("job failed")
        name = type(error).__name__
        pipe.send(("error", "JobError", f"the computation failed ({name}); the server's log says why"))


class Sender:
    """Reports progress to the dashboard, at most ten times a second."""

    def __init__(self, pipe: Connection) -> None:
        """Report to this connection."""
        self._pipe = pipe
        self._last = 0.0

    def __call__(self, share: float | None, text: str) -> None:
        """Report a share from 0 to 1 (None where unknown) and what is being done."""
        now = time.monotonic()
        if now - self._last >= 0.1:
            self._last = now
            self._pipe.send(("progress", share, text))


if __name__ == "__main__":
    serve(sys.argv[1])
