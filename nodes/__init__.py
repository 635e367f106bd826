"""What all processes of a cluster have in common."""
