"""Batches from the shared copy.

Covers: order, gathering, the arena under the DataLoader, CUDA, streaming.
Does not cover: where the data come from (cache, formats).
"""
