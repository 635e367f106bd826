"""Modules of the real system's messages, as far as scripts name them. No number depends on what is in them."""
