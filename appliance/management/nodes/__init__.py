"""The nodes of the cluster: registrations, leases, and the jobs that wait for nodes."""
