"""Sharding propagation: which part of each value each wafer has."""
