"""Divides a step into the work of the wafers and of MemoryX, into layers and shards, and makes groups of tensors."""
