"""Measures a dataset and a DataLoader, for ``legroom.check`` and ``legroom.tune``.

    import_dataset              imports a dataset by its name; its length and kind
    load_timed_samples          loads a few samples; bytes in a sample or a batch; leaves the random state as it was
    dataset_bytes_and_seconds   measures a dataset and its collate function in this process
    measure_in_child            the same in a child process that may crash; starts the trial and reads its result
    dataloader_throughput       throughput of a DataLoader, cost of sending a batch, time of a training step
    dataloader_trial            in a child: a DataLoader with given settings, for its peak memory
    memory_copied_by_gc         garbage collections in its processes, which copy memory that they share
    compare_batches_made_twice  makes batches twice in different processes, for check --share
    start_memory_guard          runs any child process under the memory guard, and reads how it ended
    memory_guard_script         the guard, a process of its own: watches memory, stops the child while enough is free

Code of a named dataset runs in child processes alone.
"""
