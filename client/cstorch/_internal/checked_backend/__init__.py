"""The backends and executions of checked runs."""
