"""How processes of a cluster reach each other."""
