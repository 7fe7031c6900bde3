"""Megatron-LM: writes its arguments, reads its launch scripts."""
