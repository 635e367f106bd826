"""The vendor's wire: tensors, steps and releases as it has them, and what gRPC tells of a call."""
