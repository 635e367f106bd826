"""Threads, folders, descriptors and memory of the host. The lowest package: it imports no other of the product."""
