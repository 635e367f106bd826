"""Settings that are on, off or left to the compiler."""

TS_UNSPECIFIED = 0
TS_ENABLED = 1
TS_DISABLED = 2
