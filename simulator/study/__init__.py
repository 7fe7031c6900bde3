"""Studies over predictions: comparison, sweeps, sensitivity, uncertainty, explanation."""
