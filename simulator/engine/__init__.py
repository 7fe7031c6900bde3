"""Executes a schedule on a cluster: the only part that imports SimPy."""
