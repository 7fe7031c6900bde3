"""Seconds for an operator or a transfer (pure functions)."""
