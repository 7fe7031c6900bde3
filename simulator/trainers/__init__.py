"""Training frameworks: what each can run, plans as their arguments, and reading their launch files."""
