"""What can be seen of a job: reports, logs, scalars and recorded time spans, on their way to management."""
