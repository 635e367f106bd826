"""Optimizers and schedules from a configuration."""
