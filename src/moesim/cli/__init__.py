"""The command line: the composition root, which may import every part."""

from moesim.cli.root import app, main

__all__ = ["app", "main"]
