"""The command line. Each command parses arguments, calls the library and prints the result.

main          entry point, list of commands, errors and exit statuses
cache, check, demo, doctor, explain, help, leak, nodes, plan, report, run, tune, watch
              one command each, with its text and JSON output; help also wraps every --help
options       argument types and options that several commands share; errors with the options of a command in place of
              Python arguments
memory_need_output
              how `plan` and `check` print memory needs
text_layout   wrapping, findings, bars of memory pools, colours
language_and_streams
              --lang and the language of click's own messages; standard streams that survive closed pipes and full
              disks, and the exit status then; errors and remarks on standard error
"""
