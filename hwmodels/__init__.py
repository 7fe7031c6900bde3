"""What the machine is: descriptions and data files; no simulation, no GPU."""
