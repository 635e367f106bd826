"""`waferbox check`: runs a script in several ways, compares what it does, and says what a cluster would make of it."""
