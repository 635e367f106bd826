"""An input worker: a process that sends the batches of an input_fn to one wafer."""
