"""The language: types, attributes, operation classes, locations, and what the table says of an operation."""
