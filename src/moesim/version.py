"""The version, apart from the public names so that every package may import it."""

__version__ = "0.1.0"
