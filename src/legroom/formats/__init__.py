"""Readers of data files: describe a file without loading it, then read arrays into memory that the caller gives.

base_reader              what a format and a reader are: records that describe a file, base class, Selection (keys)
detect                   our own formats; open_source(): recognize one by the file's bytes and open the right reader
plugin_formats           the formats that other packages add by an entry point
file_reads_and_errors    a file read at offsets, the files of a directory; errors for missing, changed, damaged files
fill_output_arrays       fill the caller's arrays: threads, byte order
decoding_memory_budget   the memory that decoding may take at once: a chunk waits until it fits beside the others
decompress_deflate       decompress deflate streams with the fastest library installed
base_table_reader        what the readers of tables share: columns, Arrow IPC output, upper bounds of sizes
npy_reader               .npy and .npz
safetensors_reader       .safetensors
torch_reader             checkpoints of torch.save, without torch and without running pickled code
token_reader             flat token files with a dtype that the caller gives, and those of llm.c; what is none
unsupported_file_types   types that are not read, and what to do: LFS pointers, HTML, images, gzip, GGUF
megatron_reader          Megatron's .idx and .bin
tar_members              the headers of a tar archive, and what its links stand for
tar_reader               WebDataset shards: the files of a tar archive grouped into samples
mds_reader               MosaicML MDS directories: index.json, shards, columns, encodings
image_folder_reader      folders of images, one directory per class; train/ and val/ are not classes
gather_byte_ranges       ragged bytes that lie in many ranges of a file, read in slabs
zarr_reader              Zarr version 2 and 3
lmdb_reader              LMDB, without its library
parquet_reader           Parquet, its footer and page headers
arrow_reader             Arrow IPC files and streams, Feather version 2
hf_datasets_reader       directories of Hugging Face datasets
hdf5_reader              HDF5: the reader itself, built from the following
hdf5_open                open read-only, detect writers, translate h5py's errors
hdf5_find_datasets       find datasets by name; the other files behind links, virtual datasets, external storage
hdf5_chunks_and_filters  decode chunked datasets in threads, as an array or slabs; undo deflate, shuffle, fletcher32
hdf5_types_and_vlen      HDF5 types as numpy dtypes; strings and sequences of variable length, in global heaps

The names that a reader in another package needs are imported at first use: ``from legroom.formats import BaseReader``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.formats.base_reader import (
        ArraySpec,
        BaseReader,
        Candidate,
        Description,
        Extent,
        Format,
        Selection,
        Slab,
        TableSpec,
    )
    from legroom.formats.base_table_reader import TableReader
    from legroom.formats.file_reads_and_errors import SourceFile, damaged
    from legroom.formats.fill_output_arrays import copy_raw

_HOMES = ("base_reader", "file_reads_and_errors", "fill_output_arrays", "base_table_reader")
__all__ = [
    "ArraySpec",
    "BaseReader",
    "Candidate",
    "Description",
    "Extent",
    "Format",
    "Selection",
    "Slab",
    "SourceFile",
    "TableReader",
    "TableSpec",
    "copy_raw",
    "damaged",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'legroom.formats' has no attribute {name!r}")
    from legroom.system.lazy_and_optional_imports import lazy_import

    modules = (lazy_import(f"legroom.formats.{home}") for home in _HOMES)
    value = globals()[name] = next(getattr(module, name) for module in modules if hasattr(module, name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
