"""MemoryX: a process that keeps a shard of a job's states, sends weights and updates them with reduced gradients."""
