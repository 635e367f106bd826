"""Clients of the real system's management, as far as scripts name them."""
