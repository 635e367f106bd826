"""The insides of cstorch: nothing here is API. From the lowest: the files of this level, tracing, lowering, session,
backend.
"""
