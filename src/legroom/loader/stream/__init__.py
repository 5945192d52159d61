"""``legroom.stream``: files larger than memory, batch by batch within a bound.

Covers: catalogues, filters, shards, shuffling, positions. Does not cover: data that fit and are shared (rows/).
"""
