"""Charts and pages. Every chart is a `Drawing`; one writer makes SVG of it, one makes PNG.

drawing            shapes, colours for light and dark, axes with their ticks, the SVG and PNG writers, file names
html_page          one HTML template: headings, tables, lists; no script, nothing loaded
memory_pool_chart  memory pools over time, with marks and alarms: `watch --plot` and the report of `run`
process_charts     memory of processes over time one above the other; growth over steps by line of code
batch_size_chart   trial batch sizes against GPU memory: `legroom.gpu.plot`
demo_chart         the chart of `legroom demo`, from the object that `--json` prints
"""
