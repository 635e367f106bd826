"""The backends, which run the steps of this process."""
