"""Sharding propagation: which part of each value every wafer has."""
