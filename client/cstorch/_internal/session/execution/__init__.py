"""Executions on the cluster: what the script does in a step, and the run that comes of it."""
