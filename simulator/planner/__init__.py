"""Plan search: every legal plan bounded, the promising ones in closed form, the best in the engine."""
