"""Starting processes: by a fork server that has torch imported, or as a Python of their own."""
