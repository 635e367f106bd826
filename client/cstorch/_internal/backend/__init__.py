"""The backends: where the steps of this process run."""
