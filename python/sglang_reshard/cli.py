"""The command line. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Reshard a trainer's DTensor shards into a live SGLang engine, shard to shard, with no gather."""


class Precision(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    both = "both"


@app.command()
def demo(
    source_tp: Annotated[int, typer.Option(envvar="SOURCE_TP", min=1, help="Trainer ranks.")] = 4,
    target_tp: Annotated[int, typer.Option(envvar="TARGET_TP", min=1, help="Engine ranks.")] = 16,
    dtype: Annotated[
        Precision, typer.Option(envvar="DTYPE", help="Of the engine. The trainer's weights are float32.")
    ] = Precision.both,
    bucket_mib: Annotated[
        float, typer.Option(envvar="BUCKET_MIB", min=0.01, help="Bucket of the broadcast, in MiB.")
    ] = 1.0,
    deadline_s: Annotated[float, typer.Option(envvar="DEADLINE_S", help="End after so many seconds.")] = 900.0,
) -> None:
    """Train, reshard into a live engine, generate, and prove it, on this machine. Ends with a line of JSON."""
    from sglang_reshard.demo.launcher import run
    from sglang_reshard.demo.settings import DTYPES, Settings

    settings = Settings(
        source_tp=source_tp,
        target_tp=target_tp,
        dtypes=DTYPES[dtype.value],
        bucket_bytes=int(bucket_mib * 1024 * 1024),
    )
    raise typer.Exit(run(settings, deadline_s))


if __name__ == "__main__":
    app()
