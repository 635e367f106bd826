"""`waferbox plan`: what a step would take on a larger cluster."""
