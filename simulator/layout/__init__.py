"""Places every part of a job: rank coordinates, stages, expert routing and bytes per GPU (pure functions)."""
