"""Readers of data files: describe a file without loading it, then read arrays into memory that the caller gives.

base_reader          what a reader is: base class, records that describe a file, Selection (keys=[...])
detect               open_source(): recognize the format by the file's bytes and open the right reader
data_file            a file read at offsets; errors for missing, unreadable, truncated and damaged files
fill_arrays          fill the caller's arrays: threads, byte order
decoding_memory      the memory that decoding may take at once: a chunk waits until it fits beside the others
decompress_deflate   decompress deflate streams with the fastest library installed
table_reader         what the readers of tables share: columns, Arrow IPC output, upper bounds of sizes
npy_reader           .npy and .npz
safetensors_reader   .safetensors
torch_reader         checkpoints of torch.save, without torch and without running pickled code
token_reader         flat token files with a dtype that the caller gives, and those of llm.c
recognize_other_files  what a file given as flat tokens is instead: compressed, an archive, a pickle, text
megatron_reader      Megatron's .idx and .bin
zarr_reader          Zarr version 2 and 3
parquet_reader       Parquet, its footer and page headers
arrow_reader         Arrow IPC files and streams, Feather version 2
hdf5_reader          HDF5: the reader itself, built from the following
hdf5_open            open read-only, detect writers, translate h5py's errors
hdf5_find_datasets   find datasets by name through groups and links
hdf5_external_files  the other files behind links, virtual datasets and external storage
hdf5_types           HDF5 types as numpy dtypes
hdf5_filters         undo deflate, shuffle and fletcher32 without HDF5
hdf5_chunks          decode chunked datasets in threads, into an array or as slabs
hdf5_vlen            strings and sequences of variable length, and the global heaps that hold them
"""
