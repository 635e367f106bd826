"""Clusters of this machine: their processes, started, recorded and ended."""
