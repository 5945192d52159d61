"""Charts and pages. Every chart is a `Drawing`; one writer makes SVG of it, one makes PNG.

drawing      shapes, colours for light and dark, axes with their ticks, and the SVG writer
png          the same drawing as PNG, by matplotlib
page         one HTML template: headings, tables, lists; no script, nothing loaded
chart_file   which file names a chart can have; a drawing as the content of a file
pool_chart   memory pools over time, with marks and alarms: `watch --plot` and the report of `run`
batch_chart  trial batch sizes against GPU memory: `legroom.gpu.plot`
demo_chart   the chart of `legroom demo`, from the object that `--json` prints
"""
