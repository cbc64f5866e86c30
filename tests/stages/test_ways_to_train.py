"""Every supported way to train, to the end: train, kill, resume, merge, verify.

`make test` runs each tuner, with ddp; the other supported pairs, and all of them on a model that sees pictures, run
before a release. What the strategies save is in test_strategies_train.
"""

from pathlib import Path

import pytest

from tiny_trainings import Tiny, losses_of, train_and_kill
from trainer_faults import DEEPSPEED, FSDP2, before_trainers
from vlmflow.config.model_types import model_types
from vlmflow.config.strategies import DDP, LORA, QLORA, STRATEGIES, TUNERS, Tuner, strategy_of
from vlmflow.merging.proof import LogitProof, TensorProof
from vlmflow.supervisor.smoke import QUANTISED
from vlmflow.supervisor.train import report, train
from vlmflow.swift.model_layers import Layers

OWN = {"zero_optimization": {"stage": 1}}
"""DeepSpeed settings of one's own."""


def ways() -> list[object]:
    """Return the parameters of every supported pair, on both models; and of LoRA's forms. Only some are quick."""
    pairs = [(tuner, name, {}, str(tuner.name)) for tuner in TUNERS.values() for name in tuner.strategies]
    pairs += [(LORA, DDP.name, {form: True}, form) for form in ("rslora", "dora")]
    return [
        pytest.param(
            *(tuner, name, lora, vision),
            marks=[] if _is_quick(tuner, name, vision) else pytest.mark.slow,
            id=f"{form}-{name}-{'pictures' if vision else 'text'}",
        )
        for tuner, name, lora, form in pairs
        for vision in (False, True)
    ]


def _is_quick(tuner: Tuner, strategy: str, vision: bool) -> bool:
    """LoRA with ddp and pictures is what test_kills kills; all weights are what text_run trains."""
    return strategy == DDP.name and not vision and tuner is QLORA


@pytest.mark.parametrize(("tuner", "name", "lora", "vision"), ways())
def test_a_killed_training_resumes_and_its_weights_are_proven(
    tmp_path: Path, tuner: Tuner, name: str, lora: dict[str, bool], vision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step after the resume has the loss that it had before the kill."""
    before_trainers(tmp_path, DEEPSPEED + FSDP2, monkeypatch)
    tiny, strategy = Tiny.write(tmp_path, vision), strategy_of(name, OWN if STRATEGIES[name].takes_json else None)
    processes = 1 if strategy is DDP else 2
    steps = {"max_steps": 6, "checkpoint_steps": 2, "evaluation_steps": 2}
    training = tiny.training(tuner, strategy, processes, lora=lora, **steps)
    train_and_kill(training, tmp_path / "runs", step=4)
    before = dict(losses_of(training, tmp_path / "runs"))
    trained = train(training, tmp_path / "runs", 2, "train_model r")
    account = report(training, trained)
    assert [step for step, _ in account.losses] == [1, 2, 3, 4, 5, 6]
    assert account.sessions == 2
    after = losses_of(training, tmp_path / "runs")[len(before) :]
    assert after[0][0] in (3, 5), "it resumed from a checkpoint"
    for step, loss in after:
        assert loss == pytest.approx(before.get(step, loss), rel=1e-4)
    tensors, logits = tiny.merged(trained, training, "proven")
    assert logits.verdict == "agree"
    assert tensors.changed_share > 0.1
    check_what_was_trained(tuner, account.layers, tensors, logits)


def check_what_was_trained(tuner: Tuner, layers: list[Layers], tensors: TensorProof, logits: LogitProof) -> None:
    """By default only the language model is trained: in all its linear layers, or in all its layers."""
    kind = model_types()["qwen3_vl"]
    language = [each for each in layers if kind.part_of(each.name) == "language_model"]
    assert not [each for each in layers if each.trained and each not in language]
    linear = [each for each in language if each.name.endswith("_proj")]
    assert len(linear) == 7
    if tuner.trains_adapter:
        assert [each for each in language if each.trained] == linear
        assert tensors.touched == sum(each.count for each in linear)
    else:
        assert all(each.trained == each.parameters for each in language)
        assert {kind.name.rpartition(".")[0] for kind in tensors.kinds} == {each.name for each in language}
        assert tensors.touched == sum(each.count for each in language)
    quantised = [each for each in layers if each.kind == QUANTISED]
    assert quantised == (linear if tuner.quantises else [])
    if tuner.quantises:
        assert all(each.bytes * 2 == each.parameters for each in linear)
        assert logits.quantisation.layers == sum(each.count for each in linear)
        assert 0.001 < logits.quantisation.deviation < 1
    else:
        assert logits.quantisation is None
