"""The engine in SimPy: the one folder that knows it."""
