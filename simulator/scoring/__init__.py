"""Predictions beside what was published and measured."""
