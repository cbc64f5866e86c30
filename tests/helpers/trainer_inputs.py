"""Encodes pictures with ms-swift's own template, as the trainer does; runs in a process of its own.

    python trainer_inputs.py MODEL OUT QUESTION ANSWER PICTURE …

OUT: a torch file with the list of what the template gives for each picture. The limits come from the environment, and
ms-swift reads them once per process.
"""

import sys

from vlmflow.swift.child_process import quick_imports

if __name__ == "__main__":
    model, out, question, answer, *pictures = sys.argv[1:]
    with quick_imports():
        import torch
        from swift import get_processor, get_template
    template = get_template(get_processor(model, model_type="qwen3_vl"), max_length=1 << 30)
    template.set_mode("train")
    turns = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": answer}]
    made = [template.encode({"messages": turns, "images": [picture]}) for picture in pictures]
    torch.save([{key: row[key] for key in ("input_ids", "image_grid_thw", "pixel_values")} for row in made], out)
