"""Compares predictions with published measurements."""
