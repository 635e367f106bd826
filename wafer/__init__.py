"""A wafer: a process that runs the layers of a step on its part of the batch."""
