"""The command line. Each command imports what it needs when it runs, so that --help is quick.

`outcome` turns errors into a line and an exit code; `values` checks options while they are parsed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_reshard.cli import keys
from sglang_reshard.cli.outcome import EXIT_CODES, Commands
from sglang_reshard.cli.values import TRANSPORTS, VERIFY, choice, finite, server_url, several_of

EPILOG = "\n\n".join(("Exit codes:", *(f"{code}  {meaning}" for code, meaning in EXIT_CODES.items())))
DEVICES = ("cuda", "cpu")
SIDES = ("auto", "trainer", "engine", "verl")
_MOST_MIB, _MOST_S = 1 << 20, 30 * 24 * 3600

app = typer.Typer(
    name="sglang-reshard",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut the names of options at 80 columns
    epilog=EPILOG,
)


def _show_versions(asked: bool) -> None:
    if asked:
        from sglang_reshard.cli.versions import versions

        typer.echo(versions())
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_versions,
            help="Print the versions of this package, its protocol, torch and SGLang.",
        ),
    ] = False,
) -> None:
    """Reshard a trainer's DTensor shards into a live SGLang engine, shard to shard, with no gather."""


@app.command()
def selftest(
    source: Annotated[
        str, typer.Option(help="The trainer's layout, such as fsdp=4, fsdp=2,tp=2 or replicas=2,fsdp=2.")
    ] = "",
    target: Annotated[str, typer.Option(help="The engine's layout, such as tp=8,ep=8 or tp=4,dp=2.")] = "",
    model: Annotated[
        str,
        typer.Option(help="tiny, tiny-moe, qwen3-1.7b, qwen3-8b, qwen3-moe, a config.json or a folder with one."),
    ] = "",
    routes: Annotated[
        str,
        typer.Option(callback=several_of(TRANSPORTS), help="Transports to time: auto, ipc, p2p, broadcast or nixl."),
    ] = "auto,p2p,broadcast",
    verl: Annotated[
        bool, typer.Option("--verl", help="Run verl instead, three steps with each kind of sync and each backend.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=1, max=_MOST_S / 60, callback=finite, help="Start nothing after so many minutes.")
    ] = 15.0,
) -> None:
    """Prove here that updates of a real SGLang engine are right.

    It measures them, too. Without options it chooses what fits on the GPUs, or on the CPU: the most important first.
    Ends with a table, what to set on this host, and a line of JSON.
    """
    from sglang_reshard.cli.layouts import Source, Target, parsed
    from sglang_reshard.selftest import launcher, spanning
    from sglang_reshard.selftest.choice import Wanted

    if verl:
        raise typer.Exit(launcher.selftest_of_verl(minutes))
    wanted = Wanted(
        source=parsed(source, Source, "--source") if source else None,
        target=parsed(target, Target, "--target") if target else None,
        model=model,
        routes=tuple(routes.split(",")),
    )
    test = spanning.selftest if spanning.is_launched() else launcher.selftest
    raise typer.Exit(test(wanted, minutes))


@app.command()
def doctor(
    url: Annotated[
        str,
        typer.Option(envvar="SGLANG_RESHARD_URL", help="Also check the SGLang server at this URL, http://host:port."),
    ] = "",
    api_key: keys.ApiKey = None,
    api_key_file: keys.ApiKeyFile = None,
    admin_api_key: keys.AdminApiKey = None,
    admin_api_key_file: keys.AdminApiKeyFile = None,
    side: Annotated[str, choice(SIDES, "The side that this environment runs.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that this machine, and a server, can run updates.

    Each failed check is shown with its fix.
    """
    from sglang_reshard.cli.doctor import examine
    from sglang_reshard.cli.doctor.finding import show
    from sglang_reshard.cli.doctor.imports import side_named

    api, admin = keys.key(api_key, api_key_file), keys.key(admin_api_key, admin_api_key_file)
    raise typer.Exit(show(examine(url, api or "", admin or "", side_named(side)), json=json))


@app.command()
def pull(
    source: Annotated[
        str, typer.Option("--from", callback=server_url, help="Server whose weights are taken, http://host:port.")
    ],
    target: Annotated[str, typer.Option("--to", callback=server_url, help="Server that takes them, http://host:port.")],
    api_key: keys.ApiKey = None,
    api_key_file: keys.ApiKeyFile = None,
    admin_api_key: keys.AdminApiKey = None,
    admin_api_key_file: keys.AdminApiKeyFile = None,
    from_api_key: keys.FromApiKey = None,
    from_api_key_file: keys.FromApiKeyFile = None,
    from_admin_api_key: keys.FromAdminApiKey = None,
    from_admin_api_key_file: keys.FromAdminApiKeyFile = None,
    transport: Annotated[str, choice(TRANSPORTS, "Transport of the weights.")] = "auto",
    verify: Annotated[str, choice(VERIFY, "Compare checksums.")] = "full",
    timeout_s: Annotated[
        float, typer.Option(min=1, max=3600, callback=finite, help="Seconds that any one wait may last.")
    ] = 300.0,
) -> None:
    """Let a server take the live weights of another one.

    That one keeps generating, and no trainer takes part. The keys are both servers', unless the first has others.
    """
    from sglang_reshard.cli.pull import run
    from sglang_reshard.protocol.server_client import ServerClient

    api, admin = keys.key(api_key, api_key_file), keys.key(admin_api_key, admin_api_key_file)
    from_api = keys.key(from_api_key, from_api_key_file)
    from_admin = keys.key(from_admin_api_key, from_admin_api_key_file)
    giver = ServerClient(source, api_key=from_api or api, admin_api_key=from_admin or admin, timeout_s=timeout_s)
    taker = ServerClient(target, api_key=api, admin_api_key=admin, timeout_s=timeout_s)
    typer.echo(run(giver, taker, timeout_s, {"transport": transport, "verify": verify}))


@app.command()
def follow(
    folder: Annotated[str, typer.Argument(help="Where snapshots are written: a folder, or a URL that fsspec knows.")],
    target: Annotated[str, typer.Option("--to", callback=server_url, help="Server that loads them, http://host:port.")],
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of this host for a copy of the snapshot. Only files that have changed are read again."
        ),
    ] = None,
    api_key: keys.ApiKey = None,
    api_key_file: keys.ApiKeyFile = None,
    admin_api_key: keys.AdminApiKey = None,
    admin_api_key_file: keys.AdminApiKeyFile = None,
    interval_s: Annotated[
        float,
        typer.Option(min=0.01, max=_MOST_S, callback=finite, help="Seconds from one look at the folder to the next."),
    ] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    allow_rollback: Annotated[
        bool, typer.Option("--allow-rollback", help="Load the newest snapshot also if the server holds later weights.")
    ] = False,
    ignore: Annotated[
        list[str] | None, typer.Option(help="fnmatch pattern of names of tensors in snapshots that are not loaded.")
    ] = None,
    no_staged: Annotated[
        bool, typer.Option("--no-staged", help="Take no memory for a second set of weights; requests wait for a load.")
    ] = False,
) -> None:
    """Let a server load each new snapshot of a folder. Trainer and server need no connection.

    The command reports a failure once and goes on; with --once it exits with 1. Without --allow-rollback it never
    loads a snapshot that is earlier than the weights of the server.
    """
    from sglang_reshard.cli.follow import run

    given = keys.key(api_key, api_key_file), keys.key(admin_api_key, admin_api_key_file)
    options = {"allow_rollback": allow_rollback, "ignore": tuple(ignore or ()), "staged": not no_staged}
    raise typer.Exit(run(folder, target, cache, given, interval_s, once=once, **options))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A folder with config.json, such a file, or a preset: qwen3-8b, qwen3-30b-a3b, ...")
    ],
    source: Annotated[str, typer.Option(help="The trainer: tp=4, fsdp=64, fsdp=8,tp=8 or hsdp=2x32.")],
    target: Annotated[str, typer.Option(help="The engine: tp=16, tp=16,ep=16 or tp=8,pp=2; dp=N for dp-attention.")],
    layers: Annotated[int, typer.Option(min=0, help="Plan for the first N layers only; 0 for all.")] = 0,
    transport: Annotated[str, choice(TRANSPORTS, "Transport of the weights.")] = "auto",
    bucket_mib: Annotated[
        float, typer.Option(min=0.01, max=_MOST_MIB, callback=finite, help="Bucket of an update, in MiB.")
    ] = 64.0,
    nvlink: Annotated[
        float, typer.Option(min=0, callback=finite, help="GB/s of a rank within its host; 0: the cost model's own.")
    ] = 0.0,
    nic: Annotated[
        float, typer.Option(min=0, callback=finite, help="GB/s of a rank between hosts; 0: the cost model's own.")
    ] = 0.0,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks per host, of the trainer and of the engine.")] = 8,
    colocated: Annotated[bool, typer.Option("--colocated", help="Both sides on the same hosts.")] = False,
    device: Annotated[str, choice(DEVICES, "Device of the engine.")] = "cuda",
    ignore: Annotated[
        list[str] | None, typer.Option(help="fnmatch pattern of names that the trainer leaves out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every rank's figures.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the bytes between all ranks into this file; its ending is the format, png for example."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Engine ranks to work on at a time.")] = 2,
    deadline_s: Annotated[
        float, typer.Option(min=1, max=_MOST_S, callback=finite, help="End after so many seconds.")
    ] = 1800.0,
) -> None:
    """Say what an update would move, without weights or GPU.

    It makes the real plan for real models, and needs SGLang but no trainer. Exits with 1 if the update would be
    refused, and with 2 if no plan can be made.
    """
    from sglang_reshard.cli.plan.command import run

    code = run(
        model,
        source,
        target,
        as_json=as_json,
        plot=plot,
        layers=layers,
        transport=transport,
        bucket_bytes=int(bucket_mib * 1024 * 1024),
        links=(nvlink * 1e9, nic * 1e9),
        ranks_per_host=ranks_per_host,
        colocated=colocated,
        device=device,
        ignore=tuple(ignore or ()),
        processes=processes,
        deadline_seconds=deadline_s,
    )
    raise typer.Exit(code)


@app.command()
def report(
    file: Annotated[
        Path,
        typer.Argument(help="report.json() of an update, or a line for each update; - for standard input."),
    ],
    update: Annotated[int, typer.Option(min=0, help="Number of the line, from 1 on; 0 for the last one.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="HTML page to write; by default FILE with .html, or update.html.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Also write a trace that ui.perfetto.dev opens.")] = None,
) -> None:
    """Draw one update as a page.

    It has a timeline by rank and phase, bytes between ranks, memory, and the choice of the transport.
    """
    from sglang_reshard.cli.report.command import run

    typer.echo(run(file, update, out, trace))
