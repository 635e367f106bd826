"""LAIR, the low-level IR: one loop over scalars, lowered from CIRH, and C++ that is generated from it.

What the prepared torch calls do in many passes over memory, a generated kernel does in one; this is what updates
weights (compiler.md sections 7 and 9). A kernel is generated, compiled and kept where it runs, never loaded from the
wire, and nothing of the wire but numbers gets into its source.
"""
