"""What runs on the machine and how long it takes."""
