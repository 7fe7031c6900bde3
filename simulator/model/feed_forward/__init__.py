"""Feed-forward half of a layer, which is dense or has routed experts."""
