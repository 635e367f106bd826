"""Access control: the cluster's secret, tokens derived from it, the rights of each call, and TLS."""
