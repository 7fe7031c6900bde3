"""Shapes, operators and counts of a transformer: pure data, no time."""
