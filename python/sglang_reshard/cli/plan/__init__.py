"""What an update would be, without weights, GPUs or a trainer: `sglang-reshard plan`.

question    what is asked: a model, a source layout, a target, hosts and links
models      presets and folders -> config.json, with fewer layers if so wanted
checkpoint  the tensors of a model's checkpoint: from its files, or from its config
sources     "fsdp=8,tp=8" -> Layout
seats       one engine rank: its real model on the meta device, its traced loader, its intake and needs
loads       what moves to and from every rank, and the buffers that this takes
work        all of that, in a fresh process
figures     the answer, as data
command     the command line's: runs the work, shows its progress and the answer
table, plot the answer for people
"""
