"""Collectives as flows: what each rank sends to which, over which links, and how long that takes."""
