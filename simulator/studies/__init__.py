"""Many predictions: sweeps, comparisons, sensitivities, intervals."""
