"""The script's side of a job: its session, the embedded cluster, executions, and the transfer of states."""
