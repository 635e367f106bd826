"""The vendor gateway: a process by which the unmodified client of the real system trains on a Waferbox cluster."""
