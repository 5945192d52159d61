"""`legroom watch` and `legroom.watch`: samples over time, alarms, and the outputs that show or store them.

watch_in_script         `legroom.watch`: watch this process from inside a script
process_selection       which processes are watched: a tree, a match, a user's, this one
take_watch_sample       take one sample: pools, processes, cache entries, within a share of the time
script_marks_and_steps  marks, components and steps that a script reports, and the files that carry them
watch_loop              take samples at the interval, evaluate alarms, pass moments to the outputs, which may block
history_and_trend       samples and free space over time; leak or warm-up, time until a pool is full, what grows
alarms                  every alarm rule with its thresholds; when an alarm begins and ends
timeline                pools, marks, alarms and processes over time, for charts and views
watch_log               the JSON lines of --log and --json, and reading them back for --replay; records as JSON objects
watch_text              plain lines
tui, tui_lines          the full-screen view: screen and keys; its lines
serve_web_page          the page of --web and its events; web_page/ has the page's files
watch_plot              the chart file of --plot
prometheus              metrics, and /metrics over HTTP; share/ has alert rules and a dashboard
http_server             the HTTP server of serve_web_page and prometheus
notify                  alarms to a command, a webhook or a function
"""
