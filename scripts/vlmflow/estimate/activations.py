"""The bytes that a forward and a backward pass need on one GPU beside the weights, from what PyTorch keeps.

Each function below counts the tensors that autograd saves, in bytes per token, as the modules of transformers 5.19 and
peft 0.20 make them on a CUDA device (modeling_qwen3.py, modeling_qwen3_vl.py, tuners/lora/layer.py):

    norm (RMSNorm)     its input in float32, one float32 per row; if its weight is trained, the normalised input
    attention          queries, keys, values and result in 16 bits, one float32 per head (flash and efficient kernels)
    linear, adapted    the dropout's mask (1 byte per number), its input after dropout, the product with A
    linear, trained    its input; under autocast each layer has a copy of its own if the input is in float32
    MLP                gate, SiLU of it, up; and their product if the next layer needs its input
    logits             three float32 copies when the backward pass begins: log-softmax, and the gradients around it

`tests/stages/test_estimated_memory.py` compares the sums with the tensors of real models.
"""

from dataclasses import dataclass

from vlmflow.estimate.parameters import ALL_LINEAR, LANGUAGE, parts
from vlmflow.estimate.shape import Matrix, ModelShape, TextShape
from vlmflow.estimate.way import FP32, Way

MASK = 1
"""Bytes of a number in a dropout mask (`native_dropout`: bool)."""

LOGIT_COPIES = 3
"""float32 copies of the logits at the beginning of the backward pass."""


HIDDEN_STATES = 5
"""Results of a layer's width that exist while its last product is computed: before and after attention, and sums."""


@dataclass(frozen=True)
class Batch:
    """The rows that one GPU processes at a time.

    rows: their number. tokens: of all rows, with padding. longest: of the longest row. logits: positions for which
    logits are computed. padded: whether some rows are shorter than others, which sdpa needs a mask for.
    pictures: picture tokens of all rows.
    """

    rows: int
    tokens: int
    longest: int
    logits: int
    padded: bool = False
    pictures: int = 0


@dataclass(frozen=True)
class Activations:
    """Bytes that the language model needs.

    kept: saved for the backward pass until a layer's turn comes. layer, logits: needed besides, at different times: to
    compute one layer again and its gradients; and for logits and loss.
    """

    kept: int
    layer: int
    logits: int


def language_activations(shape: ModelShape, way: Way, batch: Batch) -> Activations:
    """Return the bytes of the language model's activations for one batch."""
    text = shape.text
    layers = [(text.dense_layers, _layer(text, way, batch, sparse=False))]
    if text.sparse_layers:
        layers.append((text.sparse_layers, _layer(text, way, batch, sparse=True)))
    saved = sum(count * layer.saved for count, layer in layers)
    one = max(layer.saved for count, layer in layers if count)
    transient = max(layer.transient for count, layer in layers if count)
    residual = residual_bytes(way) * text.hidden_size * batch.tokens
    positions = 2 * way.compute * text.head_width * batch.tokens
    if way.gradient_checkpointing:
        kept = text.num_hidden_layers * residual
        layer = one + transient
    else:
        kept, layer = saved + residual, transient
    return Activations(kept + positions, layer, _logits(shape, way, batch))


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer: saved for its backward pass, and needed besides at its worst moment."""

    saved: int
    transient: int


def _layer(text: TextShape, way: Way, batch: Batch, *, sparse: bool) -> _Layer:
    width, tokens = text.hidden_size, batch.tokens
    full = way.is_full and LANGUAGE in way.trained
    matrices = text.attention if sparse else [*text.attention, *text.mlp]
    saved = 2 * norm(width, way, tokens, trained=full)
    saved += norm(text.queries, way, tokens, text.num_attention_heads, trained=full, half=True)
    saved += norm(text.keys, way, tokens, text.num_key_value_heads, trained=full, half=True)
    saved += _attention(text, way, batch)
    saved += sum(linear_inputs(group, way, tokens, LANGUAGE, kept=kept) for group, kept in _by_input(text, sparse))
    saved += casts(matrices, way, LANGUAGE)
    inner = text.intermediate_size
    if sparse and (experts := text.experts):
        inner = experts.per_token * experts.width
        saved += tokens * (way.compute * experts.per_token * width + 2 * FP32 * experts.number)
    saved += 3 * way.compute * inner * tokens
    return _Layer(saved, _transient(matrices, inner, width, way, tokens))


def norm(width: int, way: Way, tokens: int, heads: int = 1, *, trained: bool, half: bool = False) -> int:
    """Return the saved bytes of an RMSNorm over `width` numbers per token, in `heads` rows.

    half: its input is the result of a matrix product, in the computing type.
    """
    given = way.compute if half else residual_bytes(way)
    return tokens * (FP32 * width + FP32 * heads + (given * width if trained else 0))


def residual_bytes(way: Way) -> int:
    """Return the bytes of a number between two layers: those of the embedding's weights, from which it comes."""
    return way.base


def linear_inputs(matrices: list[Matrix], way: Way, tokens: int, part: str, *, kept: bool = False) -> int:
    """Return the saved bytes of linear layers that have the same input.

    kept: the layer before them saves this input anyway, as its result.
    """
    users = [one for one in matrices if (part in way.trained if way.is_full else is_adapted(one, way, part))]
    if not users:
        return 0
    ranks = 0 if way.is_full else len(users) * way.compute * way.adapter.rank
    if not way.is_full and way.adapter.dropout:
        each = way.compute + MASK  # the mask, and the input after dropout
        return tokens * (len(users) * each * users[0].inputs + ranks)
    # Autocast makes a copy for each layer, except of what is in 16 bits already.
    of_their_own = way.autocast and (not way.is_full or (residual_bytes(way) == FP32 and not kept))
    copies = len(users) if of_their_own else int(not kept)
    return tokens * (copies * way.compute * users[0].inputs + ranks)


def is_adapted(matrix: Matrix, way: Way, part: str) -> bool:
    """Return whether a linear layer of a part gets an adapter."""
    if way.is_full:
        return False
    targets = way.adapter.targets
    return matrix.name in targets or (ALL_LINEAR in targets and part in way.trained)


def casts(matrices: list[Matrix], way: Way, part: str) -> int:
    """Return the bytes of the 16-bit copies that autocast makes of float32 weights, and that a layer's graph keeps."""
    if not way.autocast:
        return 0
    rank = way.adapter.rank
    adapters = sum(rank * (one.inputs + one.outputs) for one in matrices if is_adapted(one, way, part))
    base = sum(one.weights for one in matrices) if way.base == FP32 else 0
    return way.compute * (adapters + base)


def _by_input(text: TextShape, sparse: bool) -> list[tuple[list[Matrix], bool]]:
    """Return the linear layers of one layer in groups that have the same input; and whether attention keeps that."""
    query, key, value, result = text.attention
    groups = [([query, key, value], False), ([result], True)]
    if sparse:
        return groups
    gate, up, down = text.mlp
    return [*groups, ([gate, up], False), ([down], False)]


def _attention(text: TextShape, way: Way, batch: Batch) -> int:
    """Return the saved bytes of attention. With a mask, sdpa repeats keys and values for every query head."""
    keys = text.queries if batch.padded else text.keys
    numbers = way.compute * (2 * text.queries + 2 * keys) + FP32 * text.num_attention_heads
    squares = batch.rows * batch.longest**2
    mask = way.compute * squares if batch.padded else 0
    if way.eager:  # the softmax in float32, and its result in the type of the values
        mask += (FP32 + way.compute) * text.num_attention_heads * squares
    return batch.tokens * numbers + mask


def _transient(matrices: list[Matrix], inner: int, width: int, way: Way, tokens: int) -> int:
    """Return the bytes that one layer needs at its worst moment beyond what it saves: in its widest matrix product.

    Full: the gradients inside the MLP, or the gradient of the largest matrix, before it is added to the others.
    Adapter: the input of the widest adapted layer in float32, before and after dropout, as peft casts it under
    autocast; and some hidden states.
    """
    product = way.compute * inner * tokens
    if way.is_full:
        largest = max(one.weights for one in matrices) if LANGUAGE in way.trained else 0
        gradient = (way.compute + (FP32 if way.base == FP32 else 0)) * largest
        return product + max(product, gradient)
    largest = max(one.weights for one in matrices)
    restored = way.compute * largest if way.quantised else 0  # a matrix is restored from 4 bits for its product
    widest = tokens * max((one.inputs for one in matrices if is_adapted(one, way, LANGUAGE)), default=0)
    copies = (FP32 + (FP32 if way.adapter.dropout else 0)) if way.autocast else 0
    states = HIDDEN_STATES * way.compute * width * tokens
    return max(product, way.compute * widest) + copies * widest + states + restored


def _logits(shape: ModelShape, way: Way, batch: Batch) -> int:
    """Return the bytes after the last layer: its result, the last norm, logits and loss; forward or backward."""
    text = shape.text
    trained = way.is_full and LANGUAGE in way.trained
    end = residual_bytes(way) * text.hidden_size * batch.tokens
    end += norm(text.hidden_size, way, batch.tokens, trained=trained)
    end += way.compute * text.hidden_size * batch.logits if trained else 0
    if way.liger:  # it computes logits, and at once their gradient, in pieces of about this size
        return end + 2 * FP32 * text.hidden_size * batch.logits
    numbers = text.vocab_size * batch.logits
    forward, backward = (way.compute + 2 * FP32) * numbers, LOGIT_COPIES * FP32 * numbers
    if way.autocast and way.base == FP32:
        head = way.compute * text.vocab_size * text.hidden_size
        backward += head
        # Until the forward pass ends, autocast keeps its copies of all trained weights, also those of finished layers.
        all_layers = way.compute * parts(shape)[LANGUAGE].linear if trained and way.gradient_checkpointing else 0
        forward += head + all_layers
    return end + max(forward, backward)
