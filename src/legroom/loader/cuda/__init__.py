"""Batches on a CUDA device.

Covers: memory registered for the GPU, gathering there or on the processor, arrays kept on the card. Does not cover: the
loop and its order (rows/).
"""
