"""One prediction: resolve a scenario, compile, execute, summarise."""
