"""The parts that the processes of all roles share: nodes and their jobs, the steps of a program, reports and logs."""
