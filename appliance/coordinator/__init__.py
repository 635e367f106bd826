"""The coordinator: one process for each job."""
