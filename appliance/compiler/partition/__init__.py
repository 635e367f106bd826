"""Dividing the step: wafers' work and MemoryX's, layers, shards, and the groups that travel between them."""
