"""Only holds `cerebras.framework.torch`."""
