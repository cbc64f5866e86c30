"""FSDP2's checkpoints, in one process; `test_strategies_train.py` trains with two."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

from vlmflow.config.strategies import strategy_of
from vlmflow.in_trainer.engine import refuse_another_engine
from vlmflow.in_trainer.fsdp2 import gathered, keep_random_states, replace_checkpoints

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def base(**settings: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | settings)).to(torch.bfloat16)


def with_adapter(**settings: Any) -> Any:
    return get_peft_model(base(**settings), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True))


def sharded(model: Any) -> Any:
    """Shard as accelerate does (utils/fsdp_utils.py): layers are recomputed, trained weights have 32 bits."""
    layers = model.get_submodule(
        "model.layers" if isinstance(model, Qwen3ForCausalLM) else "base_model.model.model.layers"
    )
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    for index in range(len(layers)):
        layers[index] = checkpoint_wrapper(layers[index], preserve_rng_state=False)
        fully_shard(layers[index])
    return fully_shard(model)


def types(model: Any) -> dict[str, torch.dtype]:
    return {name: weight.dtype for name, weight in model.named_parameters()}


class Recorded:
    """The sizes of all tensors that are gathered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        full_tensor = DTensor.full_tensor

        def recording(tensor: DTensor, **options: Any) -> torch.Tensor:
            self.sizes.append(tensor.numel())
            return full_tensor(tensor, **options)

        monkeypatch.setattr(DTensor, "full_tensor", recording)


@pytest.mark.parametrize("tied", [True, False])
def test_of_an_adapter_nothing_but_trained_weights_is_gathered(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """get_model_state_dict's own ignore_frozen_params would gather the output layer, if it is also the embedding."""
    with_adapter(tie_word_embeddings=tied).save_pretrained(tmp_path)
    plain = load_file(tmp_path / "adapter_model.safetensors")
    model = with_adapter(tie_word_embeddings=tied)
    before = types(model)
    model = sharded(model)
    trained = [weight.numel() for weight in model.parameters() if weight.requires_grad]
    recorded = Recorded(monkeypatch)
    weights = gathered(model, before, receives=True)
    assert sorted(recorded.sizes) == sorted(trained)
    model.save_pretrained(tmp_path / "sharded", state_dict=weights)
    saved = load_file(tmp_path / "sharded" / "adapter_model.safetensors")
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in plain)
    assert gathered(model, before, receives=False) == {}


def test_of_a_full_training_the_model_is_saved_in_the_types_of_before(tmp_path: Path) -> None:
    base(tie_word_embeddings=True).save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    model = base(tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    before = types(model)
    model = sharded(model)
    assert model.model.norm.weight.dtype == torch.float32
    model.save_pretrained(tmp_path / "sharded", state_dict=gathered(model, before, receives=True))
    saved = load_file(tmp_path / "sharded" / "model.safetensors")
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], plain[name]) and saved[name].dtype == torch.bfloat16 for name in plain)


def test_recomputed_layers_draw_the_same_dropout_again() -> None:
    """Otherwise gradients belong to another loss; that of the sum of a dropout's output is 0 or 1 / (1 - p)."""

    def gradient(model: torch.nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        values = torch.ones(1000, requires_grad=True)
        (output,) = model(values * 1).split(1000)
        output.square().sum().backward()
        assert values.grad is not None
        return values.grad

    def layer() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Dropout(0.5))

    recomputed = torch.nn.Sequential(checkpoint_wrapper(layer(), preserve_rng_state=False))
    assert not torch.equal(gradient(recomputed), gradient(layer()))
    keep_random_states(recomputed)
    assert torch.equal(gradient(recomputed), gradient(layer()))


def test_a_strategy_that_is_not_at_work_is_refused() -> None:
    """On the CPU accelerate trains plain DDP in place of FSDP2."""
    plain = SimpleNamespace(model_wrapped=DistributedDataParallel(base()))
    refuse_another_engine(strategy_of("ddp"), plain)
    for name in ("fsdp2", "zero2", "deepspeed"):
        with pytest.raises(RuntimeError, match=f"strategy {name} is not at work: the model is a DistributedDataPar"):
            refuse_another_engine(strategy_of(name), plain)
    with pytest.raises(RuntimeError, match="strategy ddp is not at work: the model is a FSDPQwen3"):
        refuse_another_engine(strategy_of("ddp"), SimpleNamespace(model_wrapped=sharded(base())))


def trainer(model: Any, processes: int = 1) -> Any:
    """What a checkpoint needs of transformers' Trainer, after three steps of AdamW."""
    torch.manual_seed(2)
    made = SimpleNamespace(model=model)
    replace_checkpoints(made)
    made.model = sharded(model)
    trained = [weight for weight in made.model.parameters() if weight.requires_grad]
    made.optimizer = torch.optim.AdamW(trained, lr=0.1)
    made.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: 0.5**step)
    made.args = SimpleNamespace(world_size=processes, process_index=0, should_save=True)
    return made


def steps(made: Any, number: int) -> dict[str, torch.Tensor]:
    """Train with the same gradients each time, and return the trained weights."""
    trained = {name: weight for name, weight in made.model.named_parameters() if weight.requires_grad}
    for _ in range(number):
        for weight in trained.values():
            weight.grad = torch.ones_like(weight) * weight.detach().sin()
        made.optimizer.step()
        made.lr_scheduler.step()
    return {name: weight.full_tensor().clone() for name, weight in trained.items()}


@pytest.mark.parametrize("made", [with_adapter, base])
def test_shards_resume_weights_optimizer_and_scheduler(made: Callable[[], Any], tmp_path: Path) -> None:
    """Also right after an evaluation, which leaves the last weights gathered."""
    unbroken = trainer(made())
    steps(unbroken, 3)
    with torch.no_grad():
        unbroken.model(torch.ones(1, 4, dtype=torch.int64))
    unbroken._save_optimizer_and_scheduler(str(tmp_path))
    expected = steps(unbroken, 2)
    resumed = trainer(made())
    resumed._load_from_checkpoint(str(tmp_path), resumed.model)
    resumed._load_optimizer_and_scheduler(str(tmp_path))
    found = steps(resumed, 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    fresh = trainer(made())
    fresh._load_optimizer_and_scheduler(None)
    assert not fresh.optimizer.state


def test_an_optimizer_whose_states_could_not_be_loaded_is_refused_at_the_first_checkpoint(tmp_path: Path) -> None:
    made = trainer(with_adapter())
    made.optimizer.state[made.optimizer.param_groups[0]["params"][0]]["row"] = torch.ones(3, 1)
    with pytest.raises(RuntimeError, match=r"an optimizer whose states .* found \[3, 1\] for a weight of \[4, 32\]"):
        made._save_optimizer_and_scheduler(str(tmp_path))


def test_shards_of_another_training_are_refused(tmp_path: Path) -> None:
    trainer(with_adapter())._save_optimizer_and_scheduler(str(tmp_path))
    with pytest.raises(RuntimeError, match="from 1 processes, this training has 2"):
        trainer(with_adapter(), processes=2)._load_from_checkpoint(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"other trained weights than this training has: base_model\.model"):
        trainer(with_adapter(num_hidden_layers=1))._load_from_checkpoint(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"lora_A.*: a shard of shape \[4, 48\], this training has \[4, 64\]"):
        trainer(with_adapter(intermediate_size=64))._load_from_checkpoint(str(tmp_path))
