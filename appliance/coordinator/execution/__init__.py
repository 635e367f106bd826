"""The execution of a step: loading and starting nodes, sending outputs and checkpoints to the client in order."""
