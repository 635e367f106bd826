"""The language: types, attributes, operation classes, locations, and the form of a row of the table."""
