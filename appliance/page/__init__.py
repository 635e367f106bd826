"""The page: shows a cluster and its jobs in a browser."""
