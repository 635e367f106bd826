"""Checkpoint files: the H5 layout of the real system, and the other formats that `cstorch.load` reads."""
