"""MemoryX: a process that keeps a shard of the states, and updates them with reduced gradients."""
