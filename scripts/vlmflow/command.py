"""The command `vlmflow`: what each word does with its options. The work itself is done by Snakemake, tools and remote.

`vlmflow run` and its like print a call of Snakemake and become it: nothing happens that this call would not do.
"""

import argparse
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

from vlmflow import CHECKOUT, PACKAGE

Directory = Annotated[Path, typer.Option("--directory", metavar="FOLDER", help="the working directory")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="your configuration, over config.yaml")]
MaybeFile = Annotated[Path | None, typer.Argument(metavar="FILE", help="your configuration, over config.yaml")]
Targets = Annotated[list[str] | None, typer.Argument(metavar="TARGET", help="without: the weights and pages")]
Also = Annotated[
    list[Path] | None, typer.Option("--also", metavar="FILE", help="a further configuration; takes precedence")
]
Configured = Annotated[
    list[Path] | None,
    typer.Option("--configfile", metavar="FILE", help="a configuration; a later one takes precedence"),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="the run; without it the only one", show_default=False)]
Port = Annotated[int, typer.Option(help="a port of this machine", show_default="a free one")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Yes = Annotated[bool, typer.Option("--yes", help="do it without asking")]
Namespace = Annotated[str, typer.Option(envvar="VLMFLOW_NAMESPACE", help="of Kubernetes")]

app = typer.Typer(
    help="From raw rows to verified merged weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cluster = typer.Typer(help="Push, run, log, stop, put, get, token: in Kubernetes.")
app.add_typer(cluster, name="cluster", no_args_is_help=True)


class PassesOn(TyperCommand):
    """A command whose words from the first unknown option on are Snakemake's: `ctx.obj`, unchanged."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep Snakemake's words apart, and parse the others."""
        options = [option for option in self.get_params(ctx) if option.param_type_name == "option"]
        takes_value = {name: not getattr(option, "is_flag", False) for option in options for name in option.opts}
        number = 0
        while number < len(args):
            name, given, _ = args[number].partition("=")
            if name.startswith("-") and name not in takes_value:
                break
            number += 2 if takes_value.get(name) and not given else 1
        ctx.obj = args[number:]
        return super().parse_args(ctx, args[:number])


def become_snakemake(files: Sequence[Path], words: Sequence[str], more: Sequence[str]) -> NoReturn:
    """Print a call of Snakemake, and become it; raises as `snakemake_call`."""
    call = snakemake_call(files, words, more)
    print(shlex.join(["snakemake", *call[1:]]), flush=True)
    os.execv(call[0], call)


def snakemake_call(files: Sequence[Path], words: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return a call of Snakemake with the project's Snakefile.

    files: configurations, of which a later one takes precedence. words: of the call. more: those that a person gave.

    Raises VlmflowError if a file is not there or no YAML, since Snakemake would not say where it is broken, or if
    Snakemake's own option would replace the files.
    """
    from vlmflow.config.yaml_file import read_layers
    from vlmflow.core.errors import VlmflowError

    if any(word.startswith("--configf") for word in more):
        raise VlmflowError("--configfile would replace your configuration", "name a further file by --also FILE")
    read_layers(files)
    configured = ["--configfile", *map(str, files)] if files else []
    program = str(Path(sys.executable).with_name("snakemake"))
    return [program, *words, "--snakefile", str(CHECKOUT / "Snakefile"), *configured, *more]


def folder_of(words: Sequence[str], otherwise: Path = Path()) -> Path:
    """Return the working directory that words of a call of Snakemake name, or the other one."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--directory", "-d", type=Path, default=otherwise)
    folder: Path = parser.parse_known_args(words)[0].directory
    return folder


@app.command(cls=PassesOn)
def run(
    ctx: typer.Context,
    file: File,
    targets: Targets = None,
    also: Also = None,
) -> None:
    """Make the verified weights of a run, or a target.

    All options of Snakemake follow, from the first that this command does not know.

    \b
    vlmflow run my-run.yaml -n                          what it would do, and why
    vlmflow run my-run.yaml                             all of it
    vlmflow run my-run.yaml reports/eval-my-run.html    is it better than its base?
    vlmflow run my-run.yaml --also fast.yaml --directory runs/fast --cores 8
    """
    become_snakemake([file, *(also or [])], targets or [], ctx.obj)


@app.command(cls=PassesOn)
def demo(ctx: typer.Context, directory: Directory = Path("runs/demo")) -> None:
    """Run all of it on generated rows and a tiny model."""
    directory = folder_of(ctx.obj, directory)
    sample, model = directory / "sample", directory / "tiny-model"
    changed = max(file.stat().st_mtime for file in (PACKAGE / "demo").glob("*.py"))
    if not (made := model / "config.json").is_file() or made.stat().st_mtime < changed:
        from vlmflow.tools import make_sample, make_tiny_model

        print("The sample is damaged on purpose: the workflow finds, counts and rejects broken rows and pictures.")
        make_sample.main(folder=sample)
        make_tiny_model.main(folder=model, text=[sample / "FIRE-train-100K.json"])
        made.touch()
    words = ["--profile", str(CHECKOUT / "profiles" / "demo"), "--directory", str(directory)]
    pages = [f"reports/{page}.html" for page in ("data-fire", "lengths-qwen3vl-fire", "run-qwen3vl-fire")]
    become_snakemake([CHECKOUT / "profiles" / "demo" / "run.yaml"], ["merged/qwen3vl-fire", *pages, *words], ctx.obj)


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a new one, or your repository")]) -> None:
    """Begin a folder for your own runs.

    It gets my-run.yaml, which runs as it is, a profile of Snakemake, and a README: vlmflow init runs
    """
    from vlmflow.tools import begin_folder

    begin_folder.init(folder)


@app.command()
def check(file: File, also: Also = None, as_json: Json = False) -> None:
    """Check a configuration, without Snakemake.

    It names every fault with its key, value and what is allowed: vlmflow check my-run.yaml
    """
    from vlmflow.tools import check_config

    check_config.main([file, *(also or [])], as_json)


@app.command(cls=PassesOn)
def estimate(ctx: typer.Context, file: File, name: Run = "", also: Also = None, as_json: Json = False) -> None:
    """Say what a run needs: memory, hours, price.

    It makes what the estimate needs, but requests no GPU: vlmflow estimate my-run.yaml
    """
    files = [file, *(also or [])]
    name = run_of(files, name)
    if not as_json:
        become_snakemake(files, [f"reports/estimate-{name}.html"], ctx.obj)
    call = snakemake_call(files, [f"estimates/{name}.json"], ctx.obj)
    if failed := subprocess.run(call, stdout=sys.stderr, check=False).returncode:
        raise typer.Exit(failed)
    print((folder_of(ctx.obj) / "estimates" / f"{name}.json").read_text())


@app.command("refresh-pictures", cls=PassesOn)
def refresh_pictures(ctx: typer.Context, file: File, dataset: str, also: Also = None) -> None:
    """Look again for the pictures of a data set.

    Those that were added to its folders are used: vlmflow refresh-pictures my-run.yaml my-rows
    """
    become_snakemake([file, *(also or [])], [f"data/{dataset}/stats.json", "--forcerun", "resolve_images"], ctx.obj)


@app.command("try")
def try_run(
    name: Run = "",
    picture: Annotated[Path | None, typer.Option(help="about this picture; without, a row of val")] = None,
    ask: Annotated[str, typer.Option(help="your question")] = "",
    feedback: Annotated[str, typer.Option(help="on the first answers; without it you are asked")] = "",
    most_tokens: Annotated[int, typer.Option(help="of an answer")] = 256,
    directory: Directory = Path(),
    configfile: Configured = None,
) -> None:
    """Ask base and tuned model, and give feedback.

    Both answers stand side by side: vlmflow try my-run --picture cat.jpg --ask "What is the cat doing?"
    """
    from vlmflow.tools import try_run

    name = finished(directory, name)
    try_run.main(name, configfile or [], directory, picture, ask or None, feedback or None, most_tokens)


@app.command()
def serve(
    name: Run = "",
    what: Annotated[Literal["merged", "adapter", "base"], typer.Option(help="which weights")] = "merged",
    port: Port = 0,
    gpus: Annotated[int, typer.Option(help="that share the model", show_default="those that trained it")] = 0,
    directory: Directory = Path(),
) -> None:
    """Serve a run's weights by an OpenAI-compatible API.

    On this machine alone, until Ctrl-C.

    \b
    vlmflow serve my-run --port 8000
    vlmflow serve my-run --what adapter    base and adapter, without the merge

    transformers serves a run that was trained on the CPU; vLLM, if this environment has it, one that was trained on
    GPUs (its command is printed in any case). The server asks for a key: that of VLMFLOW_ANSWER_KEY, or one that is
    made at random and printed.
    """
    from vlmflow.tools import serve

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))  # so that the server ends with us
    serve.main(finished(directory, name), directory, port, gpus, what)


@app.command()
def verify(
    name: Run = "",
    copy: Annotated[Path | None, typer.Option(metavar="FOLDER", help="a copy of merged/RUN instead of a run")] = None,
    directory: Directory = Path(),
    as_json: Json = False,
) -> None:
    """Check weights against what they were made of.

    \b
    vlmflow verify my-run
    vlmflow verify --copy /mnt/weights/my-run    on any machine

    Each link from the raw files to the weights is ok, not here, or DIFFERS. It ends with 0 only if nothing differs.
    """
    from vlmflow.serving.finished_run import published
    from vlmflow.tools import check_provenance

    folder = copy or published(directory, finished(directory, name))
    here = None if copy and directory == Path() else directory
    raise typer.Exit(not check_provenance.main(folder, here, as_json))


@app.command()
def track(
    name: Run = "",
    mlflow: Annotated[str, typer.Option(help="a server's address, or sqlite:///FILE")] = "",
    experiment: Annotated[str, typer.Option(help="MLflow's")] = "",
    wandb: Annotated[str, typer.Option(help="a project; the run is written as an offline run")] = "",
    otlp: Annotated[str, typer.Option(help="an OpenTelemetry endpoint, without /v1/traces")] = "",
    directory: Directory = Path(),
    configfile: Configured = None,
) -> None:
    """Send a finished run to trackers.

    To those named here, or to those of runs.RUN.track: vlmflow track my-run --mlflow sqlite:///mlflow.db

    It needs the environment of `vlmflow env track`. A second call sends nothing twice.
    """
    from vlmflow.tools import track_run

    named = {"mlflow": mlflow, "experiment": experiment, "wandb": wandb, "otlp": otlp}
    given = {key: value for key, value in named.items() if value}
    track_run.main(finished(directory, name), configfile or [], directory, given)


@app.command()
def publish(
    name: Run = "",
    to: Annotated[str, typer.Option(metavar="OWNER/NAME", help="the repository")] = ...,  # type: ignore[assignment]
    adapter: Annotated[bool, typer.Option("--adapter", help="the adapter alone")] = False,
    public: Annotated[bool, typer.Option("--public", help="for everybody; without it, private")] = False,
    yes: Yes = False,
    directory: Directory = Path(),
) -> None:
    """Send verified weights, or an adapter, to the hub.

    It shows what would be sent, asks, and compares digests: vlmflow publish my-run --to OWNER/NAME
    """
    from vlmflow.tools import publish_run

    publish_run.main(finished(directory, name), to, directory, adapter, public, yes)


@app.command()
def rows(
    name: Run = "",
    step: Annotated[int, typer.Option(help="an optimizer step, from 1")] = ...,  # type: ignore[assignment]
    directory: Directory = Path(),
    configfile: Configured = None,
) -> None:
    """Show which rows a training took in a step.

    With rank, id, tokens, source and first words: vlmflow rows my-run --step 1200
    """
    from vlmflow.tools import rows_of_step

    rows_of_step.main(run_of(configfile or [], name), step, configfile or [], directory)


@app.command()
def index(file: MaybeFile = None, also: Also = None, directory: Directory = Path()) -> None:
    """Write a page of all runs: reports/index.html."""
    from vlmflow.reports.overview import write_index

    write_index(layers(file, also), directory)


@app.command()
def board(file: MaybeFile = None, also: Also = None, port: Port = 0, directory: Directory = Path()) -> None:
    """Show TensorBoard over all trainings, until Ctrl-C."""
    from vlmflow.tools import board

    board.main(layers(file, also), directory, port)


@app.command()
def clean(file: MaybeFile = None, also: Also = None, yes: Yes = False, directory: Directory = Path()) -> None:
    """Delete what finished runs no longer need.

    It lists all of it and asks first: vlmflow clean my-run.yaml

    Never listed: the adapter, the proof and the weights of a finished run, any training of an unfinished one, fetched
    pictures, and stores outside of the working directory. Models, rows and pictures are listed only with FILE, which
    shows which of them are still in use.
    """
    from vlmflow.tools import clean_runs

    clean_runs.main(layers(file, also), directory, yes)


@app.command()
def pins() -> None:
    """Fill in pins.yaml, from the hub.

    With commit, size and digest of every row that lacks them.
    """
    from vlmflow.core.errors import VlmflowError
    from vlmflow.tools import make_pins

    table = CHECKOUT / "pins.yaml"
    if CHECKOUT.is_relative_to(PACKAGE):
        raise VlmflowError(f"{table} is part of the package", "write commits into addresses (…@COMMIT), or use a clone")
    make_pins.main(pins=table)


@app.command()
def status(
    file: MaybeFile = None,
    also: Also = None,
    namespace: Namespace = "vlmflow",
    directory: Directory = Path(),
    as_json: Json = False,
) -> None:
    """Show what trains here, in Slurm and in Kubernetes.

    Each with its progress, or with what it waits for.
    """
    from vlmflow.tools import status

    status.main(layers(file, also), directory, namespace, as_json)


@app.command()
def doctor(
    file: MaybeFile = None,
    also: Also = None,
    on: Annotated[Literal["kubernetes", "slurm"], typer.Option(help="which cluster")] = "kubernetes",
    runs: Annotated[list[str] | None, typer.Option("--run", metavar="RUN", help="check this run alone")] = None,
    namespace: Namespace = "vlmflow",
    profile: Annotated[str, typer.Option(help="of Slurm: yours, for this site")] = "",
    max_threads: Annotated[int | None, typer.Option(help="of Kubernetes: no rule requests more cores")] = None,
    patience: Annotated[float, typer.Option(metavar="SECONDS", help="to wait for a pod or job")] = 180,
    directory: Directory = Path(),
    as_json: Json = False,
) -> None:
    """Check what a cluster lacks for your runs.

    \b
    vlmflow doctor my-run.yaml
    vlmflow doctor my-run.yaml --on slurm --profile profiles/my-slurm
    """
    files = layers(file, also)
    if on == "slurm":
        from vlmflow.remote.slurm import doctor as slurm

        raise typer.Exit(slurm.main(files, runs or [], profile, directory, patience, as_json))
    from vlmflow.remote.kubernetes import doctor as kubernetes

    raise typer.Exit(kubernetes.main(files, runs or [], namespace, max_threads, patience, as_json))


@app.command("env")
def environment(name: Annotated[Literal["track", "search"], typer.Argument(help="what needs it")]) -> None:
    """Install the packages of trackers or searches.

    In an environment of their own, in your cache: vlmflow env search
    """
    from vlmflow.core.child_programs import installed_environment
    from vlmflow.core.errors import VlmflowError
    from vlmflow.core.files import whole_folder

    if not (folder := installed_environment(name)).is_dir():
        with whole_folder(folder) as part:
            lock = str(CHECKOUT / "envs" / f"{name}.lock")
            for python, *words in (
                [sys.executable, "-m", "venv", str(part)],
                [str(part / "bin" / "python"), "-m", "pip", "install", "--require-hashes", "--requirement", lock],
            ):
                if subprocess.run([python, *words], check=False).returncode:
                    raise VlmflowError(f"{folder}: {shlex.join(words)} failed", "it says why above; then call it again")
    print(f"{folder} has the packages of `{name}`")


@app.command()
def notebook(name: Run = "", port: Port = 0, directory: Directory = Path()) -> None:
    """Look at a run in JupyterLab.

    It needs the packages of envs/jupyter.lock.
    """
    from vlmflow.core.errors import VlmflowError

    os.environ |= {"VLMFLOW_FOLDER": str(directory.absolute()), "VLMFLOW_RUN": finished(directory, name)}
    if not (program := Path(sys.executable).with_name("jupyter")).is_file():
        lock = CHECKOUT / "envs" / "jupyter.lock"
        raise VlmflowError(
            f"{sys.prefix} has no JupyterLab", f"install {lock} (docs/use.md, Look at a run in a notebook)"
        )
    os.chdir(CHECKOUT / "notebooks")
    words = ["jupyter", "lab", *([f"--port={port}"] if port else []), "look.ipynb"]
    os.execv(program, words)


@cluster.command()
def push(namespace: Namespace = "vlmflow") -> None:
    """Replace the controller's checkout by this one."""
    in_cluster(namespace, "push")


@cluster.command("run", cls=PassesOn)
def run_there(
    ctx: typer.Context, file: File, targets: Targets = None, also: Also = None, namespace: Namespace = "vlmflow"
) -> None:
    """Push, run Snakemake in the controller, and follow it.

    With profiles/kubernetes, whose stores come first:

    \b
    vlmflow cluster run my-run.yaml merged/my-run
    """
    from vlmflow.core.errors import VlmflowError

    files = [file.absolute() for file in layers(file, also)]
    if outside := [path for path in files if not path.is_relative_to(CHECKOUT)]:
        raise VlmflowError(f"{outside[0]} is not in {CHECKOUT}, which is pushed", "move the file into the clone")
    stores = "profiles/kubernetes/stores.yaml"  # of the profile, whose files those on a command line replace
    names = list(dict.fromkeys([stores, *(str(path.relative_to(CHECKOUT)) for path in files)]))
    in_cluster(namespace, "run", "--configfile", *names, *ctx.obj, "--", *(targets or [f"merged/{run_of(files, '')}"]))


@cluster.command()
def log(namespace: Namespace = "vlmflow") -> None:
    """Follow the run in the controller."""
    in_cluster(namespace, "log")


@cluster.command()
def stop(namespace: Namespace = "vlmflow") -> None:
    """Stop the run; trainers save a checkpoint first."""
    in_cluster(namespace, "stop")


@cluster.command()
def token(namespace: Namespace = "vlmflow") -> None:
    """Make the Secret with the hub's token, from .env.

    From its line HF_TOKEN=…
    """
    in_cluster(namespace, "token")


@cluster.command()
def put(source: Path, to: str, namespace: Namespace = "vlmflow") -> None:
    """Copy files to a volume of the cluster.

    Compared with their digests: vlmflow cluster put /data/pictures /cache/image-roots/mine
    """
    in_cluster(namespace, "put", source, to)


@cluster.command()
def get(
    target: str,
    to: Annotated[Path | None, typer.Argument(show_default="as the target")] = None,
    bucket: Annotated[str, typer.Option("--from", metavar="s3://BUCKET", help="not the cluster's volume")] = "",
    namespace: Namespace = "vlmflow",
) -> None:
    """Fetch a target, compared with its digests.

    \b
    vlmflow cluster get merged/my-run
    vlmflow cluster get merged/my-run weights --from s3://BUCKET
    """
    if not bucket:
        return in_cluster(namespace, "get", target, to or target)
    from vlmflow.remote.storage import s3_get

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    s3_get.main(f"{bucket.rstrip('/')}/{target}", to or Path(target))


def in_cluster(namespace: str, action: str, *words: Any) -> None:
    """Do something with the controller of a namespace, and end with its exit code."""
    from vlmflow.remote.cluster import controller, kubectl

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    does = getattr(kubectl if action in ("get", "put") else controller, action)
    raise typer.Exit(does(kubectl.Kubectl(namespace), *words) or 0)


def layers(file: Path | None, also: list[Path] | None) -> list[Path]:
    """Return the configuration files of a command, in their order."""
    return [*([file] if file else []), *(also or [])]


def run_of(files: list[Path], name: str) -> str:
    """Return the run that a person named, or the only one of some configuration files.

    Raises VlmflowError with all of them if there are several.
    """
    from vlmflow.config.yaml_file import read_layers

    return only(name, list(read_layers(files).get("runs") or {}), ", ".join(map(str, files)) or "the configuration")


def finished(folder: Path, name: str) -> str:
    """Return the run that a person named, or the only finished one of a working directory; raises as `run_of`."""
    from vlmflow.config.settings import is_name

    made = [each.name for each in (folder / "merged").glob("*") if each.is_dir() and is_name(each.name)]
    return only(name, sorted(made), str(folder / "merged"))


def only(name: str, runs: list[str], of: str) -> str:
    """Return a name, or without it the only run."""
    from vlmflow.core.errors import VlmflowError

    if not name and len(runs) != 1:
        if not runs:
            raise VlmflowError(f"{of} has no run", "make one, or name the file or folder that has one (--help)")
        raise VlmflowError(f"{of} has {len(runs)} runs: {', '.join(runs)}", "name the run")
    return name or runs[0]


def main() -> None:
    """Run what the command line asks for; an error ends the process with its cause and the next step."""
    from vlmflow.core.errors import VlmflowError, printable_lines

    for stamp in (CHECKOUT / ".venv").glob("*.stamp"):
        lock = CHECKOUT / "envs" / f"{stamp.stem}.lock"
        if lock.is_file() and lock.stat().st_mtime > stamp.stat().st_mtime:
            print(f"vlmflow: {stamp.parent} is older than {lock}; renew it: make env", file=sys.stderr)
    try:
        app()
    except VlmflowError as error:
        sys.exit(printable_lines(str(error)))


if __name__ == "__main__":
    main()
