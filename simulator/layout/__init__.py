"""Where things live: rank coordinates, stages, routing, bytes per GPU (pure)."""
