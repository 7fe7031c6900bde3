"""Full resolution: every GPU with its own clock, expert load and links; faults; what it looks like."""
