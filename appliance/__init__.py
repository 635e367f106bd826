"""The control plane: management, coordinators, the compiler, the way in and the page."""
