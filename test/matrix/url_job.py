"""A trainer rank of an environment that has the wheel and what it declares: torch.distributed.run URL_JOB JSON.

It updates a server by URL, once by each transport, with other weights each time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import RemoteEngine, WeightSender

job = json.loads(sys.argv[1])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
server = RemoteEngine(job["url"], admin_api_key=job["key"])
seen = []
for transport, path in job["weights"]:
    whole = torch.load(path, weights_only=True)
    weights = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    sender = WeightSender(job["url"], mesh.get_group(), admin_api_key=job["key"], timeout_s=180, transport=transport)
    version = f"{job['environment']}, {transport}"
    reports = [sender.update(weights, weight_version=f"{version}, {turn}", verify="full") for turn in ("first", "warm")]
    sender.close()
    if dist.get_rank() == 0:
        sampling = {"temperature": 0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
        said = server.generate(input_ids=job["prompts"], sampling_params=sampling)
        seen.append(
            {
                "transport": reports[0].transport,
                "version": server.weights_info().version,
                "digests": [report.digest for report in reports],
                "tokens": [answer["output_ids"] for answer in said],
            }
        )
    dist.barrier()
if dist.get_rank() == 0:
    Path(job["results"]).write_text(json.dumps(seen))
dist.destroy_process_group()
