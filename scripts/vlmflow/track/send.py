"""TensorBoard's event files of all trainings, under readable names.

Tells each evaluated row as two traces, one for each model: what it was asked and what it answered, with scores.

Sends a run's story to its trackers, each on its own: one that fails keeps no other from getting it.
"""

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from vlmflow.config.after_training import TrackSettings
from vlmflow.core.account import read_account
from vlmflow.core.child_programs import MLFLOW_KEYS, OTLP_KEYS, ask, keys_of, python_of
from vlmflow.core.errors import PassingError, VlmflowError, counted, log, printable, printable_lines
from vlmflow.core.files import count_lines, sha256_of, whole_folder
from vlmflow.evaluation.choice import Case, with_right_last
from vlmflow.evaluation.report import AnsweredRow, AnswerReport, EvaluatedRow, EvaluationReport
from vlmflow.evaluation.verdict import REPORT, row_shares
from vlmflow.pictures.manifest import name_and_digest
from vlmflow.rows.chat import ROLES
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.rows.training_data import entries_named, pictures_in
from vlmflow.track.story import RowTrace, Sent, Story, Tracked, Turn

EVENTS = "*.tfevents.*"
"""The files that transformers writes for TensorBoard, in `checkpoints/runs` of a run folder."""


class EventFolders:
    """A folder of links, one for each training: TensorBoard shows their names.

    The newest training of a stage is RUN/smoke or RUN/full, any other one RUN/STAGE-DIGEST, with the name of its run
    folder. A training keeps its name: TensorBoard would mix the figures of two.
    """

    def __init__(self, store: Path, links: Path) -> None:
        """Describe the links. store: the folder of all run folders (stores.runs). links: an empty folder for them."""
        self._store, self._links = store.absolute(), links
        self._named: dict[Path, Path] = {}

    def update(self) -> list[str]:
        """Make the missing links, remove those of deleted trainings; return the names of the new ones, sorted."""
        for folder, link in list(self._named.items()):
            if not folder.is_dir():
                link.unlink()
                del self._named[folder]
        folders = self._store.glob("*/*/*/checkpoints/runs")
        filled = [folder for folder in folders if folder.parts[-4] in ("smoke", "full") and any(folder.glob(EVENTS))]
        new = [folder for folder in filled if folder not in self._named]
        return sorted(self._link(folder) for folder in sorted(new, key=_newest, reverse=True))

    def _link(self, folder: Path) -> str:
        run, stage, digest = folder.parts[-5:-2]
        link = self._links / run / stage
        if link.is_symlink():
            link = self._links / run / f"{stage}-{digest}"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(folder)
        self._named[folder] = link
        return link.relative_to(self._links).as_posix()


def _newest(folder: Path) -> float:
    """Return when the newest event file was last written."""
    return max((file.stat().st_mtime for file in folder.glob(EVENTS)), default=0.0)


Model = Literal["base", "tuned"]

ROWS = "rows.jsonl"
"""The rows in a folder eval/RUN/SPLIT or answers/RUN/SPLIT."""

MODELS: tuple[Model, ...] = ("base", "tuned")

SCORES = ("right", "exact_match", "token_f1", "anls", "relaxed_accuracy")
"""The scores of an answer, as `ModelAnswer` has them."""


def row_traces(
    evaluated: Path, answered: Path | None, rows: Path, manifests: Sequence[Path], at: float
) -> list[RowTrace]:
    """Return the traces of one split, in the order of its rows.

    evaluated: eval/RUN/SPLIT. answered: answers/RUN/SPLIT, if the models were asked. rows: data/DATASET/SPLIT.jsonl.
    manifests: the data set's image manifests; none without pictures. at: as in `RowTrace`.

    Raises VlmflowError if the rows are not those of the evaluation, a picture is in no manifest, or a file is missing
    or damaged.
    """
    report = read_account(evaluated / REPORT, EvaluationReport)
    for made in (evaluated, answered):
        if made and not (made / ROWS).is_file():
            raise VlmflowError(f"{made / ROWS}: is missing", f"remove {made}, and make it again")
    if not rows.is_file():
        raise VlmflowError(
            f"{rows}: is missing; traces show its rows",
            f"make it: vlmflow run … data/{report.dataset}/{rows.name}; or leave otlp out",
        )
    if sha256_of(rows) != report.rows_digest:
        raise VlmflowError(
            f"{rows}: it has changed since {evaluated} was made from it",
            f"evaluate again: remove {evaluated}, and run the same command again",
        )
    _refuse_other_number(evaluated, report.rows)
    answers = _answers(answered, report) if answered else {}
    digests = dict(map(name_and_digest, entries_named(pictures_in(rows), manifests).values()))
    compared = {row.id: row for row in lines_of(evaluated / ROWS, EvaluatedRow)}
    told = [row for row in lines_of(rows, ShareGptRow) if row.id in compared or row.id in answers]
    for row in told:
        if unknown := [name for name in row.images if name not in digests]:
            raise VlmflowError(
                f"{rows}, row {row.id}: picture {unknown[0]} is in no image manifest "
                f"({', '.join(map(str, manifests)) or 'none'})",
                f"check the pictures again: vlmflow refresh-pictures FILE {report.dataset}",
            )
    return [
        RowTrace(
            identity="\0".join([report.run, report.tuned.digest, report.split, row.id, model]),
            run=report.run,
            split=report.split,
            row=row.id,
            source=row.source,
            model=model,
            pictures=[digests[name] for name in row.images],
            at=at,
            turns=[*_answered(answers.get(row.id), model), *_scored(row, compared.get(row.id), model)],
        )
        for row in told
        for model in MODELS
    ]


def _answers(answered: Path, evaluation: EvaluationReport) -> dict[str, AnsweredRow]:
    """Return the answered rows by id; raises VlmflowError if some are lost, or are of other weights than evaluated."""
    report = read_account(answered / REPORT, AnswerReport)
    if report.tuned.digest != evaluation.tuned.digest:
        raise VlmflowError(
            f"{answered}: its answers are of other weights than those of eval/{evaluation.run}/{evaluation.split}",
            f"ask again: remove {answered}, and run the same command again",
        )
    _refuse_other_number(answered, report.rows)
    return {row.id: row for row in lines_of(answered / ROWS, AnsweredRow)}


def _refuse_other_number(made: Path, rows: int) -> None:
    """Raise VlmflowError if a folder's rows are not as many as its report counts: half of them would count as sent."""
    if (there := count_lines(made / ROWS)) != rows:
        raise VlmflowError(
            f"{made / ROWS}: has {there:,} rows, but {REPORT} beside it counts {rows:,}",
            f"remove {made}, and make it again",
        )


def _answered(row: AnsweredRow | None, model: Model) -> Iterator[Turn]:
    for turn in row.turns if row else ():
        answer = turn.base if model == "base" else turn.tuned
        scores = {name: float(getattr(answer, name)) for name in SCORES}
        facts = {"gold": turn.gold, "rule": turn.rule, "reference": turn.reference, "cut": str(answer.cut).lower()}
        yield Turn(f"after {counted(turn.rounds, 'round')}", turn.prompt, answer.text, scores, facts)


def _scored(row: ShareGptRow, scored: EvaluatedRow | None, model: Model) -> Iterator[Turn]:
    if scored is not None:
        case = with_right_last(Case(row, scored.group)) if scored.right is not None else None
        *before, last = case.row.conversations if isinstance(case, Case) else row.conversations
        history = "\n\n".join(f"{ROLES[turn.speaker]}: {turn.value}" for turn in before)
        facts = {"gold": scored.right or last.value} | ({} if scored.wrong is None else {"wrong": scored.wrong})
        yield Turn("gold answer", history, None, _scores(scored, model), facts)


def _scores(scored: EvaluatedRow, model: Model) -> dict[str, float]:
    """Return the margins of a row, the losses of its right answer, and what it adds to each share: 0, 1 or one half."""
    margins = scored.base if model == "base" else scored.tuned
    scores = {f"margin_{context}": margin.value for context, margin in margins.items()}
    scores |= {f"loss_{context}": margin.right.per_token for context, margin in margins.items()}
    return scores | row_shares(margins)


def all_traces(
    evaluated: Sequence[Path],
    answered: Sequence[Path],
    rows: Mapping[str, Path],
    manifests: Sequence[Path],
    at: float,
) -> list[RowTrace]:
    """Return the traces of all evaluated splits; `rows` has the data set's file of each. Raises as `row_traces`."""
    answers = {folder.name: folder for folder in answered}
    return [
        trace
        for folder in evaluated
        for trace in row_traces(folder, answers.get(folder.name), rows[folder.name], manifests, at)
    ]


CONTENT = "content"
"""The file beside an offline run that holds the digest of its content."""

NETWORK = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC"),
)
"""The variables that say how a program reaches a server, and whom it trusts."""

LONGEST = 1500.0
"""Seconds that a tracker has for a run: a server that sends a byte now and then would hold it for ever.

Two of them and the local one fit into the rule's hour.
"""

LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""What a file system says that it would say again. It may have passed with any other error, such as a full disk."""


def send(story: Story, traces: Callable[[], Sequence[RowTrace]], settings: TrackSettings, store: Path) -> Tracked:
    """Send a run to every tracker of its settings, and return what they have.

    traces: gives those of the evaluated rows. store: the folder of offline runs.

    Raises VlmflowError if the environment `track` is missing, and with all that failed, after every tracker was tried:
    PassingError if one of the failures may pass.
    """
    python_of("track")
    told = msgspec.to_builtins(story)
    senders: dict[str, Callable[[], Sent]] = {}
    if (server := settings.mlflow) is not None:
        senders["mlflow"] = partial(_to_mlflow, server, settings.experiment, told)
    if (project := settings.wandb) is not None:
        senders["wandb"] = partial(_to_wandb, project, story, told, store)
    if (endpoint := settings.otlp) is not None:
        senders["otlp"] = lambda: _to_otlp(endpoint, settings.experiment, traces(), story)
    sent: dict[str, Sent] = {}
    failed: dict[str, VlmflowError] = {}
    for name, sender in senders.items():
        try:
            run = sent[name] = sender()
            log.info(f"{name}: {run.where} {'got' if run.new else 'had'} run {story.run}, {run.figures:,} figures")
        except Exception as error:  # whatever it is, the others get their turn
            failed[name] = _explained(error)
    if failed:
        raise _all_of(failed, story.run, ", ".join(sent) or "none")
    return Tracked(story.run, story.digest, story.content, **sent)


def _explained(error: Exception) -> VlmflowError:
    if isinstance(error, VlmflowError):
        return error
    if isinstance(error, OSError):
        kind = VlmflowError if error.errno in LASTING else PassingError
        return kind(str(error), "see that this folder is there and has room, and that this account may write into it")
    log.error("this is a bug:", exc_info=error)
    return VlmflowError(f"{type(error).__name__}: {error}", "this is a bug; its traceback is above; please report it")


def _all_of(failed: dict[str, VlmflowError], run: str, reached: str) -> VlmflowError:
    """Return one error for those of several trackers, with the next step of each."""
    causes = "; ".join(f"{name}: {printable(error.cause)}" for name, error in failed.items())
    steps = "".join(f"\n  {name}: {printable_lines(error.next_step)}" for name, error in failed.items())
    passes = any(isinstance(error, PassingError) for error in failed.values())
    return (PassingError if passes else VlmflowError)(
        f"run {run} did not reach every tracker (it reached: {reached}). {causes}",
        f"as below, then run the same command again: it sends what is missing. Nothing else depends on it{steps}",
    )


def _to_mlflow(address: str, experiment: str, told: Any) -> Sent:
    question = {"to": address, "experiment": experiment, "story": told}
    answer = ask("track", "vlmflow.track.to_mlflow", question, keys_of(MLFLOW_KEYS), (*NETWORK, "MLFLOW_*"), LONGEST)
    return Sent(f"{address}, experiment {experiment}", answer["name"], answer["new"], answer["figures"])


def _to_wandb(project: str, story: Story, told: Any, store: Path) -> Sent:
    """Write the offline run, whole, in the place of an older one of this run."""
    final = store / "wandb" / f"{story.run}-{story.digest[:16]}"
    wanted = f"{project} {story.content}"
    mark = final / CONTENT
    figures = len(story.points) + len(story.results) + len(story.evaluated)
    if mark.is_file() and mark.read_text() == wanted:
        return Sent(str(final), story.run, False, figures)
    with whole_folder(final) as folder:
        question = {"project": project, "folder": str(folder.absolute()), "story": told}
        ask("track", "vlmflow.track.to_wandb", question, {"WANDB_DIR": str(folder.absolute())}, limit=LONGEST)
        for path in folder.rglob("*"):
            if path.is_symlink():  # to wandb's logs; they name the folder as it is called until it is whole
                path.unlink()
        (folder / CONTENT).write_text(wanted)
    return Sent(str(final), story.run, True, figures)


def _to_otlp(address: str, project: str, traces: Sequence[RowTrace], story: Story) -> Sent:
    question = {"to": address, "project": project, "traces": msgspec.to_builtins(traces)}
    answer = ask("track", "vlmflow.track.to_otlp", question, keys_of(OTLP_KEYS), (*NETWORK, "OTEL_*"), LONGEST)
    return Sent(address, f"{story.run}: {len(traces):,} traces", True, answer["figures"])
