"""The schedule of a MemoryX shard: send weights, receive gradients, update states."""
