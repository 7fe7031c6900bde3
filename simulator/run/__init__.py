"""Simulates a whole run: phases, checkpoints, failures, restarts, money and energy (pure, without SimPy)."""
