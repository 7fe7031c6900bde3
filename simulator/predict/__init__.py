"""Predicts one scenario: resolves, compiles, executes and summarises it."""
