"""The recording of one step, and its graph of pure functions."""
