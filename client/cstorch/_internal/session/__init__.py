"""The script's side of a job: the management service, the coordinator, the embedded cluster, state on its way."""
