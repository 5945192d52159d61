"""The version, importable from every layer without the package's public names. The build reads it from here."""

VERSION = "0.1.0"
