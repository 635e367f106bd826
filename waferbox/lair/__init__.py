"""LAIR, the low-level IR: one loop over scalars, lowered from CIRH, and C++ that is generated from it.

A generated kernel does in one pass over memory the work of many torch calls; it updates the weights (docs/compiler.md).
A kernel is generated, compiled and cached on the host where it runs, and never loaded from the wire. Only numbers of
the wire get into its source.
"""
