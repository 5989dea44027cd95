from __future__ import annotations

from pathlib import Path

import pytest

from deployments.engine.tokenizer import ChatTokenizer
from deployments.engine.weights import DEFAULT_CHAT_MODEL, pull


@pytest.fixture(scope="session")
def chat_model_folder() -> Path:
    """The default chat model, prepared where users have it."""
    return pull(DEFAULT_CHAT_MODEL, progress=False).path


@pytest.fixture(scope="session")
def chat_tokenizer(chat_model_folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(chat_model_folder)
