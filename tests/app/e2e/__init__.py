"""End-to-end tests in a browser; a package, so that its conftest has a name of its own."""
