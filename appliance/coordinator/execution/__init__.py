"""One execution of a step: nodes loaded and started, outputs and checkpoints handed to the client in order."""
