"""What the vendor's client writes, as the operations that the compiler divides."""
