"""``legroom.stream``: batches from Parquet and Arrow files larger than memory, within a memory limit.

stream_dataset      legroom.stream and the Stream that it returns, its state_dict; also a torch IterableDataset
stream_files        finds the files, reads their schemas; reads Arrow files in small steps
shard_and_shuffle   divides rows among ranks and DataLoader workers and reads them; shuffle buffer and batches of
                    exact size, with a position after each batch
stream_memory       divides the memory limit and returns freed memory to the system
parquet_row_groups  reads Parquet row groups in small steps; the filter on rows
convert_batches     record batches as numpy arrays, torch tensors or Python objects
"""
