"""The nodes of a job: leases, attachments, commands, and the links between them."""
