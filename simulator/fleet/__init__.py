"""One job on several kinds of accelerators, by pipeline rank."""
