"""The observations of a job (reports, logs, scalars, recorded time spans) on their way to management."""
