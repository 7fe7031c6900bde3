"""Releases of inference engines, one file each: habits of the scheduler, host times, sources."""
