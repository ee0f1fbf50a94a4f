"""The verbs. Each reads its words and hands over; what is heavy is imported inside the verb that needs it.

Exit codes: 0 done, 1 a run that had to end, a machine that doctor finds unfit, or a bug (a bug shows its traceback),
2 bad input, 130 and 143 interrupted by SIGINT and SIGTERM.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from draftline import __version__
from draftline.errors import InputError, Interrupted, RunError

app = typer.Typer(
    name="draftline",
    help="Train DFlash drafters: small block-diffusion draft models for speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Option("--target", help="Folder or hub id of the target model.")]
Prompts = Annotated[Path, typer.Option("--prompts", help="JSONL file of prompts or conversations.")]


class ExportFormat(StrEnum):
    reference = "reference"
    speculators = "speculators"


class Engine(StrEnum):
    draftline = "draftline"
    vllm = "vllm"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything it makes.")] = Path("runs/quickstart"),
) -> None:
    """Make a small target and a drafter for it, and measure tau.

    Everything happens on this machine: data, training, export and decoding. A few minutes on two CPU cores.
    """
    from draftline.quickstart import quickstart

    quickstart(out)


class BenchPart(StrEnum):
    step = "step"
    capture = "capture"
    pipeline = "pipeline"


class BenchLoss(StrEnum):
    ce = "ce"
    kl = "kl"
    tv = "tv"


class BenchProducts(StrEnum):
    plain = "plain"
    fp8 = "fp8"


@app.command()
def bench(
    part: Annotated[
        BenchPart,
        typer.Argument(help="A training step, the target's features, or whole runs in every placement."),
    ],
    shape: Annotated[str, typer.Option("--shape", help="A known shape, or a drafter's folder.")] = "qwen3-8b",
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Packed rows in a micro-batch.")] = None,
    sequence: Annotated[int | None, typer.Option("--sequence", min=16, help="Tokens in a row.")] = None,
    anchors: Annotated[int | None, typer.Option("--anchors", min=1, help="Blocks in a row.")] = None,
    documents: Annotated[int | None, typer.Option("--documents", min=1, help="Documents packed into a row.")] = None,
    loss: Annotated[
        BenchLoss | None, typer.Option("--loss", help="By itself ce for a step, the recipe's default for a pipeline.")
    ] = None,
    products: Annotated[
        BenchProducts, typer.Option("--products", help="The layers' products: in bf16 (plain), or fp8.")
    ] = BenchProducts.plain,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of a table.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="pipeline: keep target, logs, pictures and figures here for the next call."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="pipeline: measure this alone; may be given several times.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=3, help="pipeline: optimizer steps of each run, by itself 10.")
    ] = None,
) -> None:
    """Measure this machine: time, tokens/s, share of the matrix rate measured in the same run, memory, kernels.

    pipeline runs `draftline train` on a random target in every placement, beside what each stage reaches alone.
    """
    from draftline.bench.shapes import find_shape

    found = find_shape(shape, {"rows": rows, "sequence": sequence, "anchors": anchors, "documents": documents})
    if part is BenchPart.pipeline:
        from draftline.bench.pipeline import Wanted
        from draftline.bench.pipeline_table import bench_pipeline

        kind = None if loss is None else loss.value
        bench_pipeline(Wanted(found, kind, products.value, steps or 10, tuple(only or ()), out), as_json)
        return
    if out is not None or only or steps is not None:
        raise InputError(f"--out, --only and --steps: bench {part.value} has no use for them", "bench pipeline has")
    from draftline.bench.run import bench

    bench(part.value, found, "ce" if loss is None else loss.value, products.value, as_json)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe; only target.path and data.train must be given.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="section.key=value", help="Recipe values to replace.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of train.out.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Show what every rank would be; start nothing.")] = False,
) -> None:
    """Train a drafter as the recipe says, on all devices it asks for.

    The newest checkpoint is exported at the end, and tau is measured where the recipe names prompts.
    """
    from draftline.config import load_recipe
    from draftline.environment.overrides import enter_overrides

    parsed = load_recipe(recipe, overrides)  # before torch is imported: a bad recipe is answered at once
    enter_overrides(parsed.overrides)
    if plan:
        from draftline.monitor.notices import Notices, stdout_console
        from draftline.train.planning import show_plan

        show_plan(parsed, Notices(stdout_console()))
        return
    from draftline.train.start import train

    train(parsed, resume=resume)


@app.command()
def prepare(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe, as for train.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="section.key=value", help="Recipe values to replace.")
    ] = None,
    features: Annotated[Path, typer.Option("--features", help="Folder to write; whole shards in it are kept.")] = Path(
        "features"
    ),
    shard_gib: Annotated[float, typer.Option("--shard-gib", min=0.0, help="Largest shard, in GiB.")] = 1.0,
) -> None:
    """Run the target once over the recipe's data and write its features to disk.

    Training with target.features=FOLDER then reads them and loads no target layers.
    """
    from draftline.config import load_recipe

    parsed = load_recipe(recipe, overrides)
    from draftline.train.preparation import prepare

    prepare(parsed, features, round(shard_gib * 2**30))


@app.command()
def regenerate(
    target: Target,
    prompts: Prompts,
    out: Annotated[Path, typer.Option("--out", help="JSONL file to write; finished rows in it are kept.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")] = 2048,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts answered at a time.")] = 8,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of sampling.")] = 0,
    device: Annotated[Device, typer.Option("--device", help="auto: cuda where there is one.")] = Device.auto,
) -> None:
    """Let the target answer prompts: the data to train on."""
    from draftline.train.regeneration import RegenerateRequest
    from draftline.train.regeneration import regenerate as run

    run(RegenerateRequest(target, prompts, out, max_new_tokens, batch_size, temperature, seed, device.value))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder of a run.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[ExportFormat, typer.Option("--format", help="Layout of the folder.")] = ExportFormat.reference,
) -> None:
    """Write a checkpoint in a layout that engines load."""
    from draftline.train.publishing import export_command

    export_command(checkpoint, out, format.value)


@app.command("eval")
def evaluate(
    target: Target,
    draft: Annotated[Path, typer.Option("--draft", help="Exported drafter folder.")],
    prompts: Prompts,
    engine: Annotated[Engine, typer.Option("--engine", help="What decodes.")] = Engine.draftline,
    vllm_python: Annotated[
        Path | None, typer.Option("--vllm-python", help="Interpreter that has vLLM; else DRAFTLINE_VLLM_PYTHON.")
    ] = None,
    server: Annotated[str | None, typer.Option("--server", help="URL of a running vLLM server to use.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer in tokens.")] = 256,
    max_prompts: Annotated[int | None, typer.Option("--max-prompts", min=1, help="Use the first N prompts.")] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="auto: bfloat16 on CUDA, float32 on a CPU.")] = Dtype.auto,
    compare_plain: Annotated[
        bool, typer.Option("--compare-plain/--no-compare-plain", help="Also decode without the drafter.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure a drafter's tau and speed-up by decoding."""
    from draftline.evaluate.evaluation import EvalRequest, evaluate, print_report

    request = EvalRequest(
        target=target,
        draft=draft,
        prompts=prompts,
        engine=engine.value,
        vllm_python=vllm_python,
        server=server,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_prompts=max_prompts,
        dtype=dtype.value,
        compare_plain=compare_plain,
    )
    print_report(evaluate(request), as_json=json)


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="Folder or hub id of the target model.")],
    draft: Annotated[Path | None, typer.Argument(help="Exported drafter folder.")] = None,
) -> None:
    """Prove that a target can be tapped and a drafter fits it."""
    from draftline.evaluate.check import check

    check(target, draft)


Run = Annotated[Path, typer.Argument(help="Run folder (train.out).")]


@app.command()
def watch(run: Run) -> None:
    """Show a run live: how fast, what limits it, what to do.

    Ends with the run, or with Ctrl-C; the run is not touched. A run that has ended is shown once.
    """
    from draftline.monitor.watch import watch

    watch(run)


@app.command()
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; else RUN/report.html.")] = None,
) -> None:
    """Write a run as one page: curves, tau, where the time went, verdicts."""
    from draftline.monitor.report import write_report
    from draftline.monitor.state import read_run

    path = out or run / "report.html"
    write_report(read_run(run), path)
    print(f"wrote {path}")


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="Run folder, or its events.jsonl.")],
    run_b: Annotated[Path, typer.Argument(help="The other run.")],
) -> None:
    """Say what differs between two runs, the likeliest cause of another rate first."""
    from draftline.monitor.compare import compare
    from draftline.monitor.notices import Notices, stdout_console

    compare(run_a, run_b, Notices(stdout_console()))


@app.command()
def doctor(
    hosts: Annotated[
        str | None, typer.Option("--hosts", help="host:port,host:port of a run's hosts; start doctor on all of them.")
    ] = None,
    overrides: Annotated[
        Path | None, typer.Option("--overrides", help="Recipe: try which of its overrides are still needed, instead.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check whether this machine is fit to train.

    Exit code 0: nothing fails (warnings do not count), 1: something does.
    """
    from draftline.config import load_recipe

    recipe = None if overrides is None else load_recipe(overrides)
    from draftline.environment.ports import parse_hosts
    from draftline.monitor.notices import Notices, stdout_console

    notices = None if json else Notices(stdout_console())
    if recipe is not None:
        from draftline.train.override_trials import try_overrides

        try_overrides(recipe, notices)
        return
    from draftline.train.doctor import doctor

    if not doctor([] if hosts is None else parse_hosts(hosts), notices):
        raise typer.Exit(1)


def version(wanted: bool) -> None:
    if wanted:
        print(f"draftline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a verb and end the process with the exit code the module docstring gives (typer sees to usage errors,
    2, and interruptions where there is nothing to save, 130)."""
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Interrupted as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
