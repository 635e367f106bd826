"""Clusters of this machine: starting, supervising, recording and ending their processes."""
