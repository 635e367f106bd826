"""The control plane: gRPC servers, channels and addresses."""
