"""The nodes of a job: leased, attached to, told what to do, and which links there are between them."""
