"""Charts: pure functions from plain data to figures."""
