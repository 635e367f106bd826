"""Only holds `cs_perf_analyzer`."""
