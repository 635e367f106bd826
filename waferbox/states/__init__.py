"""The states of a job where they are kept: their memory, snapshots, recovery points, updates, and the service that
reads and writes them.
"""
