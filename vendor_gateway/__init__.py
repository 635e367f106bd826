"""The vendor gateway: the public client of the real system trains on a Waferbox cluster, unmodified."""
