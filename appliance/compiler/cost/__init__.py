"""The costs of operations: arithmetic, bytes, memory, and their predicted time on this machine."""
