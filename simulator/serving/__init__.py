"""Serving: requests, schedulers of inference engines, and what they take, event by event."""
