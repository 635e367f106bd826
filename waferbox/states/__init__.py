"""The states of a job in the process that keeps them: memory, snapshots, recovery points, updates, and the service
that reads and writes them.
"""
