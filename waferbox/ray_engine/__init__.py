"""Ray as the engine of a cluster: role processes on the hosts of a Ray cluster that is there already."""
