"""GPU memory within bounds.

Covers: limits, precision, batch size, accounting.
Does not cover: batches on their way to the GPU (loader).
"""
