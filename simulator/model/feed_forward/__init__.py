"""Feed-forward halves of a layer: dense, or routed experts with a router."""
