"""Runs a priced schedule on a cluster; only its folder `simpy/` imports SimPy."""
