"""`legroom report`: one bundle for a bug report, without private names and secrets. Nothing is sent anywhere.

collect  reads the machine, versions, cache and settings, records what the probes read, reads added files; the users,
         hosts and secrets of this machine that must be hidden
redact   hides them, and what looks private, in texts, JSON values and command lines, however escaped; pure
bundle   the parts, their list, and the .zip or .tar.gz that is written
"""
