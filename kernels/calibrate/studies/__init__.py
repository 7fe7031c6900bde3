"""Measurements of single questions on GPUs, each a script of its own; what they measured is in profiles.

Their results are in `benchmarks/gpu/results`, where the sources of the shipped data say that they are.
"""
