"""One shared copy of a dataset for all processes of a user on a machine.

Open and find:
    find_or_build     open a source: attach its entry, build it, or read it without the cache
    attach            lease, check and map an entry
    cached_data       the opened data: arrays, Arrow tables, ragged rows, tensors
    torch_dataset     a torch Dataset over the opened data
    mapped_files      mmap files copy-on-write, prefault their pages
    uncached          ``LEGROOM_DISABLE=1`` and ``backing="inplace"``

Build:
    build             one process builds, the others wait; publish the entry
    build_plan        which files to write, and where their bytes lie in the sources
    write_entry       hash, allocate and copy in threads; progress
    copy_arrays       copy or decode into the entry's files, with checksums
    staging           a builder's private directory: reserve, allocate, seal, publish
    page_placement    huge pages and NUMA interleaving for files in memory
    checksummed_io    whole reads and writes at an offset, CRC-32

Stores and entries:
    store             which directories are stores; open them; the store's lock
    locks             flock between processes
    capacity          how much still fits: file system, inodes, memory, cgroups, reservations
    manifest          what an entry holds: keys, manifest.json, .npy headers
    identity          which data a path stands for: file stamps and digests
    source_records    the digest remembered for each source

Commands:
    list_and_verify   ``legroom cache list``, ``info`` and ``verify``
    drop_and_gc       ``legroom cache drop`` and ``gc``
    eviction          remove unused entries, least recently used first
"""
