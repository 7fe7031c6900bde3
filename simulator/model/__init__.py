"""Describes a transformer by its shapes, operators and parameter counts, without any times."""
