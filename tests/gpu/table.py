"""The check's figures as a table for people."""

from typing import Any

from vlmflow.core.progress import clock


def table(figures: dict[str, Any]) -> str:
    """Return the figures of `check.check` as lines of two columns."""
    machine, weights, rows = figures["machine"], figures["weights"], figures["rows"]
    training, peak, settings = figures["training"], figures["peak"], figures["settings"]
    merge, tensors, logits = figures["merge"], figures["tensors"], figures["logits"]
    losses = training["losses"]
    lines = [
        ("device", f"{machine['device']}, {machine['cores']} cores beside it"),
        ("software", " · ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers", "peft"))),
        ("model", f"Qwen3-VL, random: {weights['total'] / 1e9:.3g} billion weights in {settings['dtype']}"),
        ("adapter", f"LoRA of rank {settings['lora']['rank']}: {weights['adapter'] / 1e6:.3g} million weights"),
        ("trainer", training["trainer"]),
        ("rows", f"{rows['rows']} of the sample, {rows['tokens'] / rows['rows']:.0f} tokens on average"),
        (
            "steps",
            f"{settings['gradient_accumulation_steps']} passes of {settings['per_device_batch_size']} rows each; "
            f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps",
        ),
        (
            "measured",
            f"the last {training['measured_steps']}: {training['tokens']:,} tokens in {training['seconds']:.1f} s",
        ),
        ("speed", _speed(training)),
        ("memory", _memory(training)),
        ("work", f"{peak['flops_per_token'] / 1e9:.3g} GFLOP per token: rows' mean of {peak['formula']}"),
        ("", "weights: D decoder, A adapter, O output, V vision, M mergers; H, W: layers × width;"),
        ("", "a row's L tokens, T trained tokens, P patches; padding and recomputation not counted"),
        ("peak", f"{peak['matmul_flops_per_second'] / 1e12:.3g} TFLOP/s in a dense bfloat16 product, measured here"),
        ("share", f"{peak['flops_per_second'] / 1e12:.3g} TFLOP/s, which is {peak['share']:.1%} of the peak"),
        ("estimate", _estimate(figures["estimate"])),
        (
            "merge",
            f"{merge['bytes'] / 1e9:.3g} GB in {merge['seconds']:.1f} s: {merge['bytes_per_second'] / 1e9:.2f} GB/s",
        ),
        (
            "tensors",
            f"verified in {tensors['seconds']:.1f} s: {tensors['touched']} merged, {tensors['untouched']} untouched, "
            f"at most {tensors['largest_deviation']:.2f} ulps off",
        ),
        (
            "logits",
            f"verified in {logits['seconds']:.1f} s: {logits['deviation']:.4f} off, {logits['allowed_deviation']:.4f} "
            f"allowed; {logits['effect_found']:.2f} of the adapter's effect, which is {logits['effect']:.3f}",
        ),
        ("in all", clock(figures["seconds"])),
    ]
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def _speed(training: dict[str, Any]) -> str:
    tokens = f"{training['tokens_per_second']:,.0f} tokens/s without padding"
    if training["positions_per_second"] is None:
        return tokens
    return f"{tokens}, {training['positions_per_second']:,.0f} positions/s with it"


def _memory(training: dict[str, Any]) -> str:
    peaks = [(name, training[name]) for name in ("allocated", "reserved") if training[name] is not None]
    return ", ".join(f"{count / 1e9:.1f} GB {name}" for name, count in peaks) + " at most" if peaks else "not measured"


def _estimate(found: dict[str, Any]) -> str:
    fast, slow = found["step_seconds"]
    error = found["memory_error"]
    compared = "not measured here" if error is None else f"{found['measured_memory'] / 1e9:.1f} reserved: {error:+.0%}"
    return (
        f"{found['memory'] / 1e9:.1f} GB of tensors ({compared}); a step {fast:.2g} to {slow:.2g} s "
        f"({found['measured_step_seconds']:.2g} measured: {found['step_error']:+.0%})"
    )
