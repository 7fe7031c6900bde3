"""The compiled engine: the events of the SimPy engine in the same order, as one loop over arrays in Numba."""
