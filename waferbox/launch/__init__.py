"""Starting processes: by a fork server that has torch imported, or as a new Python."""
