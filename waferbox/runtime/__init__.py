"""What every role's process does alike: the life of a node and of its job, the steps of a program, reports and logs."""
