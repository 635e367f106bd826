"""The private parts of cstorch. From the lowest: the files of this level, tracing, lowering, session, backend."""
