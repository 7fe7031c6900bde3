"""DeepSpeed: what it can run of a plan, and a plan as its JSON configuration."""
