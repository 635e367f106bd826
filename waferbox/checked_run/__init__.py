"""The record of a checked run, which the client library writes and `waferbox check` reads."""
