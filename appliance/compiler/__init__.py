"""The compiler: makes a plan for every role from a step in CIRH."""
