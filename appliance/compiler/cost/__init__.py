"""What operations cost: arithmetic, bytes, and the time that this machine takes for them."""
