"""The SimPy engine; no other folder imports SimPy."""
