"""Checks that a model folder is complete, sound and servable, before anyone waits on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deployments.engine.quiet import quiet_transformers
from protocol.errors import InternalError, InvalidRequest

MAX_LOADED_BYTES = 4 * 2**30
UNBOUNDED_LENGTH = 10**9


def verify(folder: Path, *, expect_sense: bool) -> int:
    """Loads the config, the tokenizer and every tensor, and tries the model.

    Models up to `MAX_LOADED_BYTES` of weights are loaded and run once; larger ones are only read.

    Args:
        folder: a chat model, or an embedder when it has a `modules.json`.
        expect_sense: also ask a question that the default models are known to get right.

    Returns:
        The context length in tokens.

    Raises:
        InvalidRequest: not a model that can be served.
        InternalError: files are missing, damaged, or the model computes nonsense.
    """
    from transformers import AutoConfig, AutoTokenizer

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(
                folder, use_fast=True, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as exc:
            raise InvalidRequest(f"{folder} cannot be served: {exc}", param="model") from exc
        is_embedder = (folder / "modules.json").is_file()
        if not is_embedder:
            _require_decoder(folder, config)
        size_bytes = _check_tensors(folder)
        if size_bytes <= MAX_LOADED_BYTES:
            probe = _probe_embedder if is_embedder else _probe_decoder
            probe(folder, tokenizer, expect_sense=expect_sense)
    return _context_length(folder, config, tokenizer)


def _require_decoder(folder: Path, config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise InvalidRequest(
            f"{folder} is a {config.model_type} model, only decoders can be served", param="model"
        )


def _check_tensors(folder: Path) -> int:
    """Reads every tensor; returns the size of the weights in bytes."""
    import torch
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    size_bytes = 0
    for shard in sorted(folder.glob("*.safetensors")):
        size_bytes += shard.stat().st_size
        try:
            with safe_open(shard, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    tensor = tensors.get_tensor(name)
                    if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                        raise InternalError(f"{shard.name}: tensor {name} is not finite")
                    names.add(name)
        except (SafetensorError, OSError) as exc:
            raise InternalError(f"{shard.name} is damaged: {exc}") from exc
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = json.loads(index.read_text(encoding="utf-8"))["weight_map"].keys() - names
        if missing:
            raise InternalError(f"{folder} lacks {len(missing)} tensors, such as {min(missing)}")
    return size_bytes


def _probe_decoder(folder: Path, tokenizer: Any, *, expect_sense: bool) -> None:
    """Greedy tokens after a short prompt: the weights fit the architecture and compute numbers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    if expect_sense:
        ids = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
    else:
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    prompt_length = ids.shape[1]
    with torch.inference_mode():
        for _ in range(12 if expect_sense else 1):
            logits = model(ids).logits[0, -1]
            if not torch.isfinite(logits).all():
                raise InternalError(f"{folder} computes logits that are not finite")
            ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    answer = tokenizer.decode(ids[0, prompt_length:], skip_special_tokens=True)
    if expect_sense and "Paris" not in answer:
        raise InternalError(f"{folder} answers {answer!r} when asked for the capital of France")


def _probe_embedder(folder: Path, tokenizer: Any, *, expect_sense: bool) -> None:
    """Mean-pooled vectors of three sentences: finite, and near in meaning is near in space."""
    import torch
    from transformers import AutoModel

    model = _load(AutoModel, folder)
    texts = ["How do I bake bread?", "What is the way to make a loaf?", "The stock market fell."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    near, far = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    if not bool(torch.isfinite(vectors).all()) or (expect_sense and near < far + 0.2):
        raise InternalError(
            f"{folder} embeds nonsense: a paraphrase at {near}, a stranger at {far}"
        )


def _load(auto_class: Any, folder: Path) -> Any:
    try:
        model, info = auto_class.from_pretrained(
            folder,
            dtype="auto",
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise InvalidRequest(f"{folder} cannot be served: {exc}", param="model") from exc
    missing = info["missing_keys"]
    if missing:
        raise InternalError(f"{folder} lacks {len(missing)} tensors, such as {min(missing)}")
    return model.eval()


def _context_length(folder: Path, config: Any, tokenizer: Any) -> int:
    """The smallest of the limits that the model, the tokenizer and sentence-transformers state."""
    text_config = config.get_text_config()
    limits = [
        getattr(text_config, "max_position_embeddings", None),
        getattr(text_config, "n_positions", None),
        tokenizer.model_max_length,
    ]
    sentence = folder / "sentence_bert_config.json"
    if sentence.is_file():
        limits.append(json.loads(sentence.read_text(encoding="utf-8")).get("max_seq_length"))
    stated = [int(limit) for limit in limits if limit and limit < UNBOUNDED_LENGTH]
    if not stated:
        raise InvalidRequest(f"{folder} states no context length", param="model")
    return min(stated)
