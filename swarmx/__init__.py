"""SwarmX: broadcasts weights to the wafers and reduces their gradients."""
