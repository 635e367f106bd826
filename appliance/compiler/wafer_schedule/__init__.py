"""The schedule of a wafer in weight streaming (receive, run, send), and the memory that it takes."""
