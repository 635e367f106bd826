"""The basis of all parts of the compiler: the target, errors, precision, and changes of a module in place."""
