"""The management service: jobs, the queue, and leases on nodes."""
