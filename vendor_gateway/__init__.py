"""The vendor gateway: serves the unmodified client of the real system on a Waferbox cluster."""
