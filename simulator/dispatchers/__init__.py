"""Dispatchers, which move tokens to experts on other GPUs: one library a file, each with all that it is."""
