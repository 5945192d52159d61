"""``legroom.DataLoader`` and ``legroom.collate``: torch's DataLoader, with batches in shared memory outside /dev/shm.

The loader, in the training process:

    dataloader             the class, its arguments, the start of an epoch
    epoch_iterator         one epoch: takes batches from torch's iterator, counts them
    resume                 state_dict and load_state_dict, resuming in the middle of an epoch
    explain_start_failure  errors of the constructor and the start: arguments, pickling, a TMPDIR too long for sockets
    explain_worker_crash   why a worker crashed: signal, exit code, OOM counters

The transport, from a worker to the training process:

    collate       wraps a collate function; stacks samples into a slot
    send          writes tensors and arrays into a slot, and the rest as a small pickle
    memory_slots  a slot (memfd), and the slots of one worker
    queues        multiprocessing's queue without a thread, with a socket for file descriptors
    receive       maps a slot in the training process, returns it when the batch is gone
    pin_memory    registers slots with CUDA

Workers where memory is low:

    admit_workers_by_memory  measures the first worker before the others load samples; refuses what does not fit
    worker_shutdown          ends a worker with its program; stops one before memory runs out

Several trainers with one set of workers:

    sharing           share="name": a process that makes each batch once, and hands it to all trainers of a group

Private interfaces of torch are used in ``torch_internals`` alone, those of multiprocessing in ``queues``.
"""
