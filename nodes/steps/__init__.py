"""The run time of a step: a role's program, its tensor groups, and which steps do what."""
