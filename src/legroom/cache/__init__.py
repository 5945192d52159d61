"""One copy of a dataset for every process of a user on this machine.

Covers: identity by content, stores, building, leases, reaping.
Does not cover: reading formats (formats) and making batches (loader).

    open.py      legroom.open                     catalog.py  what is in the cache
    find.py      stamps → digest → entry          reap.py     drop, gc
    build.py     one builder, the others wait     verify.py   checksums
    attach.py    lease, check, map                evict.py    least recently used first
    place.py     which directories are stores     room.py     what still fits
"""
