"""Tests of steps on a cluster: the plugin for pytest."""
