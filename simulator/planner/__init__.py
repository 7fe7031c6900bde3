"""Plan search: bounds every legal plan, estimates the promising ones and simulates the best."""
