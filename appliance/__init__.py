"""The control plane: management, coordinators, the compiler, the ingress and the page."""
