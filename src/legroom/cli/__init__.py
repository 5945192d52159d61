"""The command line: one file a verb; parse, call, render.

Covers: arguments, layout, exit statuses.
Does not cover: any logic; that is the library's.
"""
