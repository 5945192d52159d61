"""One shared copy of a dataset for all processes of a user on a machine.

Open and find:
    expand_braces             the names that ``train-{000..127}.tar`` stands for
    find_or_build_entry       open a source: attach its entry, or build it in the first store with room
    lease_and_map_entry       lease, check and map an entry
    cached_arrays_and_tables  the opened data: arrays, ragged rows, tensors, and tables by name
    cached_tables             the Arrow tables: shards as one, columns as arrays or by row
    torch_dataset             a torch Dataset over the opened data
    open_without_cache        ``LEGROOM_DISABLE=1`` and ``backing="inplace"``

Build:
    elect_builder_and_publish  one process builds, the others wait; publish the entry
    plan_entry_files           which files to write, and where their bytes lie; several sources joined as one dataset
    write_entry_files          hash, allocate, copy or decode in threads; progress
    download                   a remote object as a file that fills while it is read; resume
    downloads_in_store         downloads in a store: where they are, who works on them, their room
    staging_directory          a builder's private directory: lock, reserve, allocate, seal, publish

Frozen objects:
    freeze                       ``legroom.freeze``, ``legroom.freeze_dataset``: the entry of Python objects
    frozen_sequence_and_mapping  the views: a Sequence and a Mapping on the shared copy
    frozen_encoding              Python objects as bytes and back, type by type
    frozen_writer                encode containers piece by piece into the entry's arrays

Stores and entries:
    store_directories           which directories are stores; open them; the store's lock; trash and leftovers
    locks                       flock between processes
    mapped_files_and_checksums  mmap copy-on-write, huge pages, NUMA nodes; read and write at an offset, CRC-32
    store_free_space            how much still fits: file system, inodes, memory, cgroups, reservations
    manifest                    what an entry holds: keys, manifest.json, .npy headers; revisions of readers
    file_stamps                 stamps of a file, and of all files below a directory
    source_stamps_and_digests   which data a path stands for: file stamps and digests
    source_digest_records       the digest of each source, and for a minute the version of a remote object

Commands:
    list_and_verify  ``legroom cache list``, ``info`` and ``verify``; which entries are stale
    drop_and_gc      ``legroom cache drop`` and ``gc``
    entry_users      which processes map an entry
    list_gpu_copies  which processes have copies in GPU memory
    eviction         remove unused entries, least recently used first
"""
