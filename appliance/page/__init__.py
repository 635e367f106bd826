"""The page: what a cluster does, in a browser."""
