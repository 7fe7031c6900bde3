"""Plans of a fleet of several kinds of accelerators."""
