"""Functions that prepare the torch calls of operations; the rows of the table name them."""
