"""Progress, metrics and logs."""
