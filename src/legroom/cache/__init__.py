"""One copy of a dataset for every process of a user on this machine.

Covers: identity by content, stores, building, leases, reaping.
Does not cover: reading formats (formats) and making batches (loader).
"""
