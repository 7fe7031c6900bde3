"""The bytes on every GPU: what lives where, by kind and by rank, and what an allocator makes of it."""
