"""``legroom.DataLoader(..., share="name")``: one set of workers makes the batches of several trainers.

    shared_epoch_iterator          in a trainer: the iterator, and its state
    producer_client                in a trainer: finds the producer or starts one, and asks it for batches
    make_batches_in_trainer        in a trainer: makes batches that the group does not have, and all while it is alone
    map_slots_in_trainer           in a trainer: maps slots privately, returns them when a batch is gone
    copy_batches_to_gpu            in a trainer: brings batches to its GPU
    produce_and_serve_batches      makes the batches, and serves its trainers
    producer_main                  entry point of the producer's process
    start_producer_process         starts that process, with the dataset as a pickle or by fork
    batch_window_and_late_joiners  which batches are kept, who waits for whom, when a slow trainer is let go
    assign_copies_to_gpu           which trainer copies a batch to a GPU, and which read that copy
    producer_messages              messages and descriptors between a trainer and the producer
    group_folder                   the sockets, locks and the producer's log of all groups of a user
    group_settings                 what must be equal in a group, compared by digests of settings, samples and functions
    order_and_seed_of_each_batch   order and random numbers as functions of the group's seed, the epoch and the batch

Who changes what: the window is in the producer's memory alone, changed under one lock. A trainer changes nothing that
is shared: it sends what it needs and what it has released. So no process can leave a shared structure half changed.

What happens when a process is killed, whatever it was doing:

    a trainer      the kernel closes its connection; the producer forgets its position and what it held
    the producer   every trainer sees the closed connection and makes its batches itself. The first that gets the lock
                   starts another, which makes a window of its own; batches in use stay mapped
    a worker       the producer starts new workers at the same batch. If workers die at that batch again and again,
                   every trainer gets the error
    all of them    the kernel frees sockets, locks and memory; the next trainer starts as the first did
"""
