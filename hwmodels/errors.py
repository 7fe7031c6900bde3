"""Errors a user can act on: each carries the value, the limit, the place and the remedy."""

from __future__ import annotations


class MoesimError(Exception):
    """Base of every error that the command line shows as one paragraph instead of a traceback."""

    exit_code = 2


class InputError(MoesimError):
    """Malformed or illegal input: unknown key, wrong unit, a plan that does not divide (exit code 2)."""

    exit_code = 2


class InfeasibleError(MoesimError):
    """Legal input that cannot work: does not fit in memory, an empty search (exit code 3)."""

    exit_code = 3
