"""What all parts of the compiler rest on: the target, errors, and changing a module in place."""
