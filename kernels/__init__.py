"""Measurement: hand-written PTX kernels and the harness that runs them (needs a GPU to run, not to import)."""
