"""Gives every argument of a launch file a meaning, and turns the file into a scenario."""
