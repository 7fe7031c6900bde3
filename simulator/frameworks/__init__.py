"""Trainers by release: what each keeps, launches, overlaps and allocates, and what follows from it."""
