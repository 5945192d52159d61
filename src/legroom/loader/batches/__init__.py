"""``legroom.open`` and ``data.batches``: batches gathered from the shared copy, without worker processes.

legroom_open             legroom.open and the Data that it returns
batch_iterator           Batches: the loop and its epochs; gathers the next batch in a thread where that saves time
state_dict               the state of a loop over batches, which is checked when it is loaded
batch_settings           checks the arguments of data.batches, selects the columns, chooses the path (cpu, …)
cpu_gather               copies rows into batches on the CPU: threads beside the training loop, reused buffers
cuda_calls_for_gather    the calls to torch.cuda and the CUDA runtime that the gatherers need
cuda_gather_base         what the CUDA gatherers share: side stream, row layout, resources kept per process
choose_faster_cuda_path  chooses between copy engines, kernel and CPU threads in the first batches of a loop
cuda_copy_engine         the GPU's copy engines fetch rows from shared memory registered with CUDA
cuda_registered          the GPU's cores gather from the same memory, with a small kernel or index_select
cuda_kernel              that kernel, compiled by NVRTC
cuda_pinned              the CPU gathers into page-locked buffers, which are copied to the GPU
cuda_resident            the arrays are kept in GPU memory, one copy for all processes, and gathered there
cuda_upload              copies arrays to GPU memory with several threads
"""
