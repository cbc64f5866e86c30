"""Writes a run as an offline run of Weights & Biases; runs in the environment `track` (core/child_programs).

Question: {"project": …, "folder": an empty folder, "story": `Story`}. Answer: {"figures": …}.

`wandb sync FOLDER/wandb/offline-run-*` sends it. Its id is the run's digest, so W&B has one run after a second sync.
"""

import os
from collections import defaultdict
from typing import Any

import wandb

from vlmflow.core.child_programs import answer_with


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Write the offline run."""
    story = question["story"]
    os.environ["WANDB_MODE"] = "offline"
    settings = wandb.Settings(
        mode="offline",
        console="off",
        disable_code=True,
        disable_git=True,
        silent=True,
        x_disable_machine_info=True,  # this machine is not the one that trained
        x_disable_meta=True,
        x_disable_stats=True,
    )
    run = wandb.init(
        project=question["project"],
        id=story["digest"][:32],
        name=story["run"],
        dir=question["folder"],
        config=story["settings"] | {"facts": story["facts"]},
        settings=settings,
    )
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for point in story["points"]:
        steps[point["step"]][point["key"]] = point["value"]
    for step in sorted(steps):
        run.log(steps[step], step=step)
    run.summary.update(story["results"] | story["evaluated"])
    run.finish()
    return {"figures": len(story["points"]) + len(story["results"]) + len(story["evaluated"])}


if __name__ == "__main__":
    answer_with(main)
