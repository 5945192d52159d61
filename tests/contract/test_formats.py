"""What every format promises, checked for all of them alike against the library that wrote the file."""

from __future__ import annotations

from format_samples import SAMPLES

from legroom.testing import FormatContract


class TestFormats(FormatContract):
    samples = SAMPLES
