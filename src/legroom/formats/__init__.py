"""Files as arrays: describe() without loading, read_into(buffer).

Covers: HDF5, npy/npz, Parquet/Arrow, Zarr, safetensors behind one protocol.
Does not cover: where the bytes go (cache) or in which order they are read (loader).
"""
