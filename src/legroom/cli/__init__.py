"""The command line. Each command parses arguments, calls the library and prints the result.

main          entry point, list of commands, errors and exit statuses
cache, check, demo, doctor, explain, help, leak, nodes, plan, report, run, tune, watch
              one command each, with its text and JSON output
options       argument types and options that several commands share
option_names  errors with the options of a command in place of Python arguments
memory_need_output
              how `plan` and `check` print memory needs
help_formatter
              how --help is wrapped
pool_usage_bar
              one memory pool on a line: from which use its bar is yellow or red
text_layout   wrapping, findings and colours
language_and_streams
              --lang and the language of click's own messages; standard streams that survive closed pipes and full
              disks, and the exit status then
"""
