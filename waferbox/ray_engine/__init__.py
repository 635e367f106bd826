"""Ray as the engine of a cluster: role processes on the hosts of an existing Ray cluster."""
