"""`sglang-reshard plan`: predicts an update without weights, GPUs or a trainer.

request         the model, the source layout, the target, hosts and links, as given on the command line
models          presets and folders -> config.json, optionally with fewer layers
checkpoint      the tensors of a model's checkpoint, from its files or from its config
sources         "fsdp=8,tp=8" -> `SourceLayout`
sglang_model    one engine rank's real SGLang model in this process, on a fake process group
rank_model      one engine rank: its model, its traced loader, its read plan and demand
loads           bytes to and from every rank, and the buffers that they take
cost            predicted seconds of a transfer, from a few constants
work            all of that, in a worker process
worker_process  runs a function in a separate process, which reports while it works
forked_jobs     runs jobs in forked children, with a deadline
figures         the result as data
command         runs the work, shows its progress and its result
table, plot     the result for people
"""
