"""Executions on the cluster: the step as the script makes it, its stream, its input and outputs, and its checks."""
