"""Mix the validated rows of several data sets, and account for every row."""

from pathlib import Path

from vlmflow.core.account import read_account, refuse_other_rows, write_account
from vlmflow.core.files import whole_file
from vlmflow.harness.stage import run_stage
from vlmflow.pictures.store import PictureStore
from vlmflow.reports.counts_page import counts_page
from vlmflow.rows.mixture import mix_rows
from vlmflow.rows.mixture_files import Member
from vlmflow.rows.stats import Stats


def main(
    *,
    rows: list[Path],
    accounts: list[Path],
    member_pictures: list[Path],
    stats: Path,
    counts: Path,
    manifests: list[Path],
    mix: dict[str, str],
    seed: int,
    picture_store: Path,
) -> None:
    """Make one mixture.

    rows: train.jsonl, val.jsonl and test.jsonl of its data sets, in data/NAME. accounts: their stats.json, in the order
    of `mix`. member_pictures: their image manifests, in images/NAME; none of those without pictures.
    stats: the account to write; the JSON lines train, val, test and quarantine are written beside it.
    counts: the account as an HTML page, to write. manifests: the image manifests to write: train, val, test.
    mix, seed: the mixture's settings. picture_store: the folder with the stores of all data sets.
    """
    members = []
    for (name, drawn), account in zip(mix.items(), accounts, strict=True):
        refuse_other_rows(account, [file for file in rows if file.parent == account.parent])
        pictures = [manifest for manifest in member_pictures if manifest.parent.name == name]
        members.append(Member(name, drawn, account.parent, read_account(account, Stats), pictures))
    made = mix_rows(members, stats.parent, {file.stem: file for file in manifests}, seed)
    store = PictureStore(picture_store, stats.parent.name)
    for member in members:
        if member.manifests:
            store.mix(member.name)
    write_account(stats, made)
    with whole_file(counts, "w") as page:
        page.write(counts_page(made))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
