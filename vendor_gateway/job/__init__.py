"""What a client of the vendor's has here: its jobs, which are one of ours, with their steps and states."""
