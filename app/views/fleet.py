"""The page Fleet."""


def show() -> None:
    """Draw the page."""
