"""An input worker: runs the input_fn for one wafer."""
