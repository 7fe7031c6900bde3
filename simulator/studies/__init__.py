"""Studies of many predictions: sweeps, comparisons, sensitivities and intervals."""
