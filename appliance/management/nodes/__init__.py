"""The nodes of the cluster: who is there, who has them, and who waits for some."""
