"""Links of the data path: frames on two lanes, shared memory within a host and gRPC between hosts."""
