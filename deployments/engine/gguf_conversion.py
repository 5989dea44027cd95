"""Turns a GGUF file into a safetensors folder with tokenizer and chat template, in bfloat16."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from deployments.engine.quiet import quiet_transformers


def convert(gguf: Path, into: Path) -> None:
    """Writes the model folder. Needs `gguf` and `accelerate`; the memory of the float32 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The GGUF loader draws a progress bar of its own that no setting turns off.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        # Both would mark the plain weights as quantized, and the folder could not be loaded.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(into, safe_serialization=True)
        tokenizer.save_pretrained(into)
    if _pre_tokenizer_name(gguf) == "smollm":
        _split_digits(into / "tokenizer.json")


def _pre_tokenizer_name(gguf: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field else None


def _split_digits(tokenizer_json: Path) -> None:
    """Restores a step that GGUF only names: SmolLM splits digits before anything else.

    Without it spaces in front of numbers are tokenised otherwise than in training.
    """
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, content["pre_tokenizer"]],
    }
    tokenizer_json.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
