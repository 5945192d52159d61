"""``data.batches``: rows of a shared copy as batches, without worker processes.

Covers: order, ranks, buffers, gathering, prefetching, state. Does not cover: CUDA (cuda/), worker processes (arena/).
"""
