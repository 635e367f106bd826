"""Running modules and initialisation programs on the CPU."""
