"""The version, importable from every layer without the package's public names."""

VERSION = "0.1.0.dev0"
