"""The schedule of a wafer: receive, run, send; and the memory that it takes."""
