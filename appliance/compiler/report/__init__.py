"""The compile report, as data and as a page; and the stages of a compile as text."""
