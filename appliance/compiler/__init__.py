"""The compiler: CIRH text in, a plan for every role out."""
