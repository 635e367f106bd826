"""Which kernels the old compiler was to generate."""

AP_DISABLED = 0
AP_ENABLED = 1
