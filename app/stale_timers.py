"""Keeps a timer of a page that is gone from emptying the page after it.

Where a click is answered with another page, timers of the page before may fire until the browser knows. The
framework (1.60 to 1.67) runs such a request after the new page was drawn: it announces the page before, for
which the browser empties the new one, and only then finds that the fragment does not exist any more. Here the
request is dropped before anything is announced. `page_switch.redrawn` answers requests for fragments that
both pages have.
"""

from __future__ import annotations

from functools import wraps
from typing import Any


def ignore() -> None:
    """Drop what timers ask for of fragments that do not exist any more.

    The framework has no public place for this, so its method that runs the script is wrapped.
    """
    from streamlit.runtime.scriptrunner.script_runner import ScriptRunner

    run = ScriptRunner._run_script

    @wraps(run)
    def run_existing(runner: Any, request: Any) -> None:
        if not _is_stale(runner, request):
            run(runner, request)

    ScriptRunner._run_script = run_existing  # type: ignore[assignment, method-assign]


def _is_stale(runner: Any, request: Any) -> bool:
    if not request.is_auto_rerun or not request.fragment_id_queue:
        return False
    return not any(map(runner._fragment_storage.contains, request.fragment_id_queue))
