"""Reports, log lines, spans and memory measurements of updates; knows nothing of how an update works.

`report` has what every trainer rank learns of an update and prints it, `logs` adds the update's fields to log records,
`spans` emits OpenTelemetry spans if the application collects them, `peak_memory` measures an update's extra memory.
"""
