"""The recording of one step, and the graph of pure functions that is made of it."""
