"""Checkpoint files: the H5 layout of the real system, written and read, and what else `cstorch.load` reads."""
