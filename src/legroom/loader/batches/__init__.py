"""``legroom.open`` and ``data.batches``: batches gathered from the shared copy, without worker processes.

open_data         legroom.open and the Data that it returns
batch_iterator    Batches: the loop, epochs, state_dict
batch_arguments   checks the arguments of data.batches and selects the columns
batch_state       the state_dict format, and which states are refused
gather            copies rows into batches on the CPU: threads, reused buffers
prefetch          gathers the next batch in a thread where that saves time
transfer_path     chooses the path: cpu, cuda-registered, cuda-pinned, cuda-copy or cuda-resident
cuda_driver       the calls to torch.cuda and the CUDA runtime
cuda_gather       what the CUDA gatherers share: side stream, row layout, resources kept per process
cuda_registered   the GPU gathers from shared memory registered with CUDA
cuda_pinned       the CPU gathers into page-locked buffers, which are copied to the GPU
cuda_resident     the arrays are kept in GPU memory and gathered there
"""
