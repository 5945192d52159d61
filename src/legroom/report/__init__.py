"""`legroom report`: one bundle for a bug report, without private names and secrets. Nothing is sent anywhere.

collect      reads the machine, its versions, cache and settings, and records what the probes read
attachments  reads the files that the user adds: a training log, the report of a run, the log of a watch
identities   the users, hosts and secrets of this machine that must be hidden
redact       hides them, and what looks private, in texts, JSON values and command lines; pure
unescape     every way to read an escaped text, so that nothing hides behind an encoding; pure
bundle       the parts, their list, and the .zip or .tar.gz that is written
"""
