"""Prices collectives as flows between ranks, from the links that the flows cross."""
