"""The whole run: phases, checkpoints, failures and restarts, money and energy. Pure; no SimPy."""
