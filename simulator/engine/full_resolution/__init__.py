"""Full resolution: simulates every GPU of the cluster with its own links, faults and statistics."""
