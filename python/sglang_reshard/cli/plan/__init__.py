"""`sglang-reshard plan`: predicts an update without weights, GPUs or a trainer.

request         model, source, target, hosts and links, as given on the command line; "fsdp=8,tp=8" -> `SourceLayout`
checkpoint      a model's config.json, and the tensors of its checkpoint, from its files or from its config
sglang_model    one engine rank's real SGLang model in this process, on a fake process group
rank_model      one engine rank: its model, its traced loader, its reads, the bytes and buffers that these take
cost            predicted seconds of a transfer, from a few constants
work            all of that, in a worker process
worker_process  runs a function in a separate process, which reports while it works, and jobs in forks of it
figures         the result as data
command         runs the work, shows its progress and its result
table           the result for people: tables, and a picture
"""
