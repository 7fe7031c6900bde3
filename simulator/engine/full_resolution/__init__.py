"""Every GPU for itself: groups, links, faults, statistics."""
