"""Loaders of batches, each in a folder that does not import the others, and predictions for them.

    dataloader              legroom.DataLoader, legroom.collate: torch's DataLoader outside /dev/shm
    batches                 legroom.open(...).batches: batches from the shared dataset cache
    shared_model_weights    legroom.weights: tensors of a model, one copy on the host and on each GPU
    stream                  legroom.stream: Parquet and Arrow files with bounded memory
    tune                    legroom.tune: DataLoader settings chosen by measuring
    measure                 measures a dataset and a DataLoader in child processes, for tune and check
    legroom_check           legroom.check: whether a training run fits on this machine
    settings_of_checked_dataloader  which settings it judges: those given, else those of the DataLoader
    legroom_plan            legroom.plan: how many jobs fit on this machine, from a description or from running jobs
    measure_process_memory  memory of this process, of an idle worker, of an interpreter with torch
    shared_gpu_memory       one copy in GPU memory for every process: made, handed on, freed with the last
    rank_sampler            chosen rows, permutation of an epoch and its division among ranks; rank and world size

import-linter checks which of these may import which (pyproject.toml).
"""
