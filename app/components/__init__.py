"""Parts of pages that draw themselves in the browser, with scripts of our own that the server serves."""
