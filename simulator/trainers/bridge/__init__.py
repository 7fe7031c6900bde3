"""Megatron-Bridge: what it can run of a plan, and a plan as settings of its configuration."""
