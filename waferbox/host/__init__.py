"""What a process asks of its host: threads, folders, descriptors, memory. The lowest package: it imports nothing of
ours.
"""
