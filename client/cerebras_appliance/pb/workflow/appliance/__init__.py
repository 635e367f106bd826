"""Modules of the real system's messages, as far as scripts name them."""
