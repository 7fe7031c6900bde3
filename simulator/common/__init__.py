"""Helpers for every package: `key=value` texts, list expressions and tables of results."""
