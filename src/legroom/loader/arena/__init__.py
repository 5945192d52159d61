"""A batch's way from a worker: slots of shared memory of its own.

Covers: a slot, what is written into it, a worker's slots, their return, pinning. Does not cover: torch's loader around
it (dataloader.py), what a batch is made of (collate.py).
"""
