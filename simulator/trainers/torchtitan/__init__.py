"""torchtitan: writes its configuration."""
