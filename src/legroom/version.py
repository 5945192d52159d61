"""The version, where every layer may read it without importing the package's own names."""

VERSION = "0.1.0.dev0"
