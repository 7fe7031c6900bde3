"""Pages: one module each with a function `show() -> None`."""
