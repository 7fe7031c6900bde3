"""Prices operators, transfers and collectives in seconds (pure functions)."""
