"""A trainer as public ones are built: configurations from constructors' annotations, callbacks, rounds of two loops."""
