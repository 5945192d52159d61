"""Charts and pages. Every chart is a `Drawing`; one writer makes SVG of it, one makes PNG.

drawing                  shapes, colours for light and dark, axes with their ticks, the SVG and PNG writers, file names
html_page                one HTML template: headings, tables, lists; no script, nothing loaded
pool_and_process_charts  memory pools over time with marks and alarms, memory of processes, growth over steps
batch_size_chart         trial batch sizes against GPU memory: `legroom.gpu.plot`
demo_chart               the chart of `legroom demo`, from the object that `--json` prints
"""
