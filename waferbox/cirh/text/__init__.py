"""CIRH as text: parser and printer."""
