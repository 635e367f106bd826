"""Layer pipelined mode: a wafer divided into regions of layers, which have several micro-batches in flight."""
