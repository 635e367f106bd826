"""Passes for text of the vendor's client: they replace its operations by others that the compiler can divide."""
