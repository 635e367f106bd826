"""The compile report: as data, as a page, and the stages as text."""
