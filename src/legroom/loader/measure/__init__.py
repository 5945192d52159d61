"""Measures a dataset and a DataLoader, for ``legroom.check`` and ``legroom.tune``.

    import_dataset  imports a dataset by its name; its length and kind
    dataset_samples  loads a few samples; bytes in a sample or a batch
    dataset_cost     bytes and seconds of a dataset and its collate function, in this process
    dataset_child    the same in a child process that may crash
    benchmark        throughput of a DataLoader, cost of sending a batch, time of a training step
    trial            in a child: a DataLoader with given settings, for its peak memory
    guarded_trial    runs the trial and reads its result
    repeated_batches  makes batches twice in different processes, for check --share
    guarded_child    runs any child process under the memory guard
    memory_guard     the guard: a script that watches memory and stops the child in time

Code of a named dataset runs in child processes alone.
"""
