"""``legroom.stream``: batches from Parquet and Arrow files larger than memory, within a memory limit.

stream_dataset          legroom.stream and the Stream that it returns; also a torch IterableDataset
stream_state            the state_dict format, and which states are refused
stream_files            finds the files, reads their schemas
row_filter              the condition on rows: checked against the schema, applied to rows
rank_and_worker_shards  divides rows among ranks and DataLoader workers and reads them
shuffle                 shuffle buffer and batches of exact size, with a position after each batch
stream_memory           divides the memory limit and returns freed memory to the system
parquet_row_groups      reads Parquet row groups in small steps; skips those in which no row passes the filter
arrow_ipc               reads Arrow IPC files and streams in small steps
convert_batches         record batches as numpy arrays, torch tensors or Python objects
"""
