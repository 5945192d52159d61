"""One bundle for a bug report, with nobody's secrets in it.

Covers: gathering what a report needs, taking out what is private (pure), packing it into one file that is only ever
written here. Does not cover: sending it, which nothing in Legroom does; showing it (cli).
"""
