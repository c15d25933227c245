"""`python -m benchmark`: SGLang's own update path and ours over the same live engine, beside a plain copy of the bytes.

__main__   the command line               launcher   one case after another, each in processes of its own
cases      what is measured               trainer    one trainer rank of a case
models     configs and checkpoint names   weights    FSDP2 shards that change before every update
paths      ours; `stock` SGLang's own     timing     updates in step, and what each rank saw
exactness  digests against a stock load   memory     what a process takes beyond what it had
copying    the machine's limit, between paths
rows       from what was seen to rows     results    the JSON files
pages      into README.md, docs/results   plots      as pictures
scaling    against tensors, bytes, ranks

Independent of these: benchmarks of one question each, most of them with processes that stand in for engine ranks
(`world`, `matrices`). `pages` writes the results of all of them into docs/results, by `templates`.
"""
