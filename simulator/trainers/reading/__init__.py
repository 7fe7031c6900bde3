"""Readers of launch files: shell scripts, YAML, TOML, JSON and Python recipes, of which nothing is run."""
