"""Text to token ids and back, and the chat template.

Roles are a security boundary: a control token is recognised only where the chat template itself
writes it. Whatever a user, a tool or a stored turn says is tokenised as plain text, even when it
spells a control token.

How: in the strings that go into the template, the first character of everything that spells a
control token is masked by digits that occur in none of them. In the rendering only the template's
own control tokens are left; each is replaced by a private stand-in, the mask is taken off, and the
text is encoded in one call by a copy of the tokenizer that knows the stand-ins but splits control
tokens into plain pieces. One call, so that ordinary text gets exactly the ids of transformers'
`apply_chat_template`, whatever normalizer or prefix space the tokenizer has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deployments.engine.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from protocol.errors import InvalidRequest
from protocol.request import Message

logger = logging.getLogger(__name__)

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class ChatTokenizer:
    """The tokenizer of one model. Immutable once built, so any thread may use it at any time.

    Args:
        hf: a fast transformers tokenizer.
        name: what errors call the model.
        vocab_size: width of the model's logits; None: of the tokenizer.
        eos_token_ids: ids that end a generation, in addition to the tokenizer's own and the token
            with which the chat template ends a turn.
    """

    def __init__(
        self,
        hf: Any,
        *,
        name: str,
        vocab_size: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.hf = hf
        self.name = name
        spec = json.loads(hf.backend_tokenizer.to_str())
        self._template_source = _template_source(hf.chat_template)
        added = {token["content"]: token for token in spec["added_tokens"]}
        self._control = _ControlTokens(
            {
                content: token["id"]
                for content, token in added.items()
                if token["special"] or _is_written_by(content, self._template_source)
            }
        )
        self._special = _ControlTokens(
            {content: token["id"] for content, token in added.items() if token["special"]}
        )
        self._encoder = _Encoder(spec, self._control)
        self._prefix = self._prompt_prefix()
        self._pieces = _Pieces(hf, spec)
        self.vocab_size = vocab_size or len(hf)
        self.longest_token_bytes = self._pieces.longest_bytes
        self.chat_template_digest = hashlib.sha256(self._template_source.encode()).hexdigest()[:16]
        ends = {hf.eos_token_id, self._end_of_turn_id()} - {None}
        self.eos_token_ids = eos_token_ids | frozenset(ends)

    @staticmethod
    def load(folder: Path) -> ChatTokenizer:
        """Reads the tokenizer of a model folder; never the network, never code from the folder.

        Raises:
            InvalidRequest: the folder has no fast tokenizer.
        """
        try:
            hf = AutoTokenizer.from_pretrained(
                folder, use_fast=True, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError) as exc:
            raise InvalidRequest(f"no tokenizer can be read in {folder}: {exc}") from exc
        if not hf.is_fast:
            raise InvalidRequest(f"{folder} has no tokenizer.json, only fast tokenizers are served")
        config = _read_json(folder / "config.json")
        text_config = config.get("text_config", config)
        generation = _read_json(folder / "generation_config.json")
        return ChatTokenizer(
            hf,
            name=folder.name,
            vocab_size=text_config.get("vocab_size"),
            eos_token_ids=frozenset(
                _ids(generation.get("eos_token_id")) + _ids(text_config.get("eos_token_id"))
            ),
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template_source)

    def encode_chat(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """The prompt for the next turn of a chat, generation prompt included.

        A `developer` message goes into the template as `system` unless the template names that
        role: most templates refuse roles they don't know, and those that accept any would show the
        model a role it was never trained on. Arguments of tool calls, JSON text on the wire, become
        objects, as templates expect.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                f"model {self.name} has no chat template, send a prompt instead", param="messages"
            )
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        turns = [self._turn(message) for message in messages]
        try:
            _check_unicode([turns, tools])
            mask = _Mask([turns, tools])
            masked = [self._mask_turn(turn, mask) for turn in turns]
            masked_tools = mask.cover(tools, self._control) if tools else None
        except RecursionError as exc:
            raise InvalidRequest("messages are nested too deeply", param="messages") from exc
        rendering = self._render(masked, masked_tools, mask)
        return self._encode(rendering, mask, param="messages")

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain prompt, after the token that the tokenizer begins texts with, if any.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        try:
            _check_unicode(text)
        except InvalidRequest as exc:
            raise InvalidRequest(exc.message, param="prompt") from exc
        mask = _Mask(text)
        ids = self._encode(mask.cover(text, self._control), mask, param="prompt", is_plain=True)
        return self._prefix + ids

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder for one answer."""
        return self._pieces.detokenizer()

    def decode(self, ids: Sequence[int]) -> str:
        """All ids at once, special tokens left out: what a `detokenizer` adds up to."""
        return str(
            self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds in the middle of a text; a special token's own name; b"" when unused."""
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, incomplete characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance needs it. Takes about a second the first time."""
        spec = json.loads(self.hf.backend_tokenizer.to_str())
        spec["truncation"] = spec["padding"] = None
        return LLTokenizer(
            json.dumps(spec),
            n_vocab=max(self.vocab_size, len(self.hf)),
            eos_token=sorted(self.eos_token_ids),
        )

    def _turn(self, message: Message) -> dict[str, Any]:
        """A message as templates know it; absent fields are left out."""
        role: str = message.role
        if role == "developer" and "developer" not in self._template_source:
            role = "system"
        turn = {
            "role": role,
            "content": message.content,
            "name": message.name,
            "tool_calls": _with_parsed_arguments(message.tool_calls),
            "tool_call_id": message.tool_call_id,
        }
        return {key: value for key, value in turn.items() if value is not None}

    def _mask_turn(self, turn: dict[str, Any], mask: _Mask) -> dict[str, Any]:
        # Markers such as </think> that are not special are the model's own words in its turns, and
        # templates look for them there.
        control = self._special if turn["role"] == "assistant" else self._control
        return {key: mask.cover(value, control) for key, value in turn.items() if key != "role"} | {
            "role": turn["role"]
        }

    def _render(
        self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, mask: _Mask
    ) -> str:
        try:
            return self._apply_template(turns, tools)
        except Exception as exc:
            # A template is code that came with the model: it may raise anything over odd messages.
            reason = mask.uncover(str(exc)) or type(exc).__name__
            raise InvalidRequest(
                f"the chat template of {self.name} refuses these messages: {reason}",
                param="messages",
            ) from exc

    def _apply_template(
        self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> str:
        return str(
            self.hf.apply_chat_template(
                turns, tools=tools, add_generation_prompt=True, tokenize=False
            )
        )

    def _encode(self, text: str, mask: _Mask, *, param: str, is_plain: bool = False) -> list[int]:
        """Encodes a masked text; only unmasked control tokens become control tokens.

        `is_plain`: the text has no control tokens at all.
        """
        encoder = self._encoder
        if not is_plain:
            text = encoder.stand_in(text)
        ids = encoder.encode(mask.uncover(text))
        if ids is None:
            # The vocabulary spells a control token out of plain text (some Unigram models do).
            ids = encoder.encode(mask.uncover(text, after=encoder.break_token))
        if ids is None:
            raise InvalidRequest(
                f"{param} contains a control token of {self.name} that cannot be read as text",
                param=param,
            )
        return ids

    def _prompt_prefix(self) -> list[int]:
        """The ids that the tokenizer puts before a text (BOS); what it appends is left out."""
        backend = self.hf.backend_tokenizer
        plain = backend.encode("a", add_special_tokens=False).ids
        full: list[int] = backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []

    def _end_of_turn_id(self) -> int | None:
        """The control token that the template writes right after an assistant's words, if any."""
        if not self.has_chat_template:
            return None
        words = "quartz"
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": words}]
        try:
            rendering = str(self.hf.apply_chat_template(turns, tokenize=False))
        except Exception as exc:
            # As in `_render`; a model whose template cannot be probed still has its config's ids.
            logger.warning("chat template of %s cannot be probed: %s", self.name, exc)
            return None
        _, _, rest = rendering.rpartition(words)
        found = self._special.pattern.match(rest.lstrip())
        return self._special.ids[found.group()] if found else None


def byte_tokenizer() -> ChatTokenizer:
    """A tokenizer without a model: one token per byte of UTF-8, and a ChatML template."""
    alphabet = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHATML_TEMPLATE,
    )
    return ChatTokenizer(hf, name="bytes")


class _ControlTokens:
    """A set of control tokens, and where a text spells one."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        source = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self.pattern = re.compile(source)
        self._starts = re.compile(f"(?=(?:{source}))(.)", re.DOTALL)
        self._first_characters = {content[0] for content in ids}
        self._beginnings = {
            content[:length] for content in ids for length in range(1, len(content))
        }
        self._longest = max(map(len, ids), default=0)

    def mask(self, text: str, masked: Mapping[str, str]) -> str:
        """Replaces the first character of every control token in `text`.

        Also that of a beginning of one at the very end, which the template could complete.
        """
        if self._first_characters.isdisjoint(text):
            return text
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                end = text[-length:]
                text = text[:-length] + masked[end[0]] + end[1:]
                break
        return self._starts.sub(lambda found: masked[found.group(1)], text)


class _Mask(Mapping[str, str]):
    """Stands for characters by digits that occur in none of the given strings.

    Digits only, because they survive what templates do to strings: trim, change case, escape.
    """

    def __init__(self, values: Any) -> None:
        strings = list(_strings(values))
        self._nonce = _nonce()
        while any(self._nonce in string for string in strings):
            self._nonce = _nonce()
        self._characters: list[str] = []

    def __getitem__(self, character: str) -> str:
        if character not in self._characters:
            self._characters.append(character)
        return f"{self._nonce}{self._characters.index(character):04d}"

    def __iter__(self) -> Any:
        return iter(self._characters)

    def __len__(self) -> int:
        return len(self._characters)

    def cover(self, value: Any, control: _ControlTokens) -> Any:
        """A copy of `value` in which no string, however deep, spells a control token."""
        if isinstance(value, str):
            return control.mask(value, self)
        if isinstance(value, dict):
            return {
                self.cover(key, control): self.cover(item, control) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.cover(item, control) for item in value]
        return value

    def uncover(self, text: str, after: str = "") -> str:
        """Puts the characters back, each followed by `after`."""
        for character in self._characters:
            text = text.replace(self[character], character + after)
        return text


def _nonce() -> str:
    # A zero in front and nowhere else: two occurrences cannot overlap.
    return "0" + str(secrets.randbits(80)).replace("0", "9")


class _Encoder:
    """A copy of the tokenizer in which only stand-ins mean control tokens.

    It is set up once: toggling special tokens while another thread encodes fails in tokenizers.
    """

    def __init__(self, spec: dict[str, Any], control: _ControlTokens) -> None:
        added = {token["content"]: token for token in spec["added_tokens"]}
        copy = spec | {
            "truncation": None,
            "padding": None,
            "added_tokens": [
                token | {"special": token["special"] or token["content"] in control.ids}
                for token in spec["added_tokens"]
            ],
        }
        self._tokenizer = Tokenizer.from_str(json.dumps(copy))
        self._tokenizer.encode_special_tokens = True
        self._pattern = control.pattern
        # What the model makes of characters it does not know is no forgery.
        self._control_ids = frozenset(control.ids.values()) - {_unknown_id(self._tokenizer, spec)}
        base = "x" + secrets.token_hex(12)
        self._stand_ins = {content: f"{base}y{i}z" for i, content in enumerate(control.ids)}
        self.break_token = f"{base}yz"
        self._tokenizer.add_tokens(
            [
                AddedToken(
                    name,
                    single_word=added[content]["single_word"],
                    lstrip=added[content]["lstrip"],
                    rstrip=added[content]["rstrip"],
                    normalized=added[content]["normalized"],
                    special=False,
                )
                for content, name in self._stand_ins.items()
            ]
            + [AddedToken(self.break_token, normalized=False, special=False)]
        )
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._meaning: dict[int, int | None] = {
            ids[name]: control.ids[content] for content, name in self._stand_ins.items()
        }
        self._meaning[ids[self.break_token]] = None

    def stand_in(self, text: str) -> str:
        """Replaces control tokens by their stand-ins."""
        return self._pattern.sub(lambda found: self._stand_ins[found.group()], text)

    def encode(self, text: str) -> list[int] | None:
        """The ids of `text`, stand-ins as control tokens; None when plain text became a control token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            return None
        meant = (self._meaning.get(token_id, token_id) for token_id in ids)
        return [token_id for token_id in meant if token_id is not None]


def _unknown_id(tokenizer: Tokenizer, spec: dict[str, Any]) -> int | None:
    """The id that plain text gets where the vocabulary has nothing for it, if any."""
    model = spec["model"]
    unknown = model.get("unk_token")
    return model.get("unk_id") if unknown is None else tokenizer.token_to_id(unknown)


class _Pieces:
    """What each token looks like, and the decoder strategy that fits the vocabulary."""

    def __init__(self, hf: Any, spec: dict[str, Any]) -> None:
        backend = hf.backend_tokenizer
        self._decode_ids = backend.decode
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self._special_ids = frozenset(t["id"] for t in spec["added_tokens"] if t["special"])
        kinds = _decoder_kinds(spec.get("decoder"))
        self._is_byte_level = kinds == ["ByteLevel"]
        self._holds_replacement = "ByteLevel" in kinds
        self._byte_ids = (
            {i: int(token[3:5], 16) for token, i in vocabulary.items() if _BYTE_TOKEN.match(token)}
            if "ByteFallback" in kinds
            else {}
        )
        to_bytes = _byte_level_bytes if self._is_byte_level else self._rendered_bytes
        names = {token_id: token for token, token_id in vocabulary.items()}
        self._bytes = [
            to_bytes(names[i], i) if i in names else b"" for i in range(max(names, default=-1) + 1)
        ]
        for i in self._special_ids:
            self._bytes[i] = names[i].encode()
        self._shown_ids = frozenset(names) - self._special_ids
        self._emitted = [b"" if i in self._special_ids else b for i, b in enumerate(self._bytes)]
        self.longest_bytes = max(map(len, self._bytes), default=1)

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def detokenizer(self) -> Detokenizer:
        if self._is_byte_level:
            return ByteDetokenizer(self._emitted)
        return WindowDetokenizer(
            lambda ids: str(self._decode_ids(ids, skip_special_tokens=True)),
            shown_ids=self._shown_ids,
            byte_ids=self._byte_ids,
            holds_replacement=self._holds_replacement,
        )

    def _rendered_bytes(self, token: str, token_id: int) -> bytes:
        if token_id in self._byte_ids:
            return bytes([self._byte_ids[token_id]])
        # Twice, so that the second is not the first of the text, whose space decoders strip.
        once = self._decode_ids([token_id], skip_special_tokens=False)
        twice = self._decode_ids([token_id, token_id], skip_special_tokens=False)
        return str(twice[len(once) :]).encode()


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2, 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, num_shifted = [], 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + num_shifted))
            num_shifted += 1
    return symbols


_BYTE_OF_SYMBOL = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}


def _byte_level_bytes(token: str, token_id: int) -> bytes:
    """A token's bytes; one with a character outside the byte alphabet means itself."""
    try:
        return bytes([_BYTE_OF_SYMBOL[symbol] for symbol in token])
    except KeyError:
        return token.encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    """The types of a decoder's steps."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for step in decoder["decoders"] for kind in _decoder_kinds(step)]
    return [decoder["type"]]


def _template_source(template: str | dict[str, str] | None) -> str:
    """All templates of a model as one text."""
    if isinstance(template, dict):
        return "\n".join(f"{name}: {template[name]}" for name in sorted(template))
    return template or ""


def _is_written_by(content: str, template_source: str) -> bool:
    """Whether an added token that is not special is a marker of the template (as `<think>`)."""
    return not content.isspace() and content in template_source


def _with_parsed_arguments(tool_calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tool calls with their arguments as objects, where they are JSON objects in a string."""
    if tool_calls is None:
        return None
    parsed = []
    for call in tool_calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            call = call | {"function": function | {"arguments": _object(function["arguments"])}}
        parsed.append(call)
    return parsed


def _object(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _strings(value: Any) -> Any:
    """Every string in `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _check_unicode(value: Any) -> None:
    """Refuses lone surrogates, which JSON can carry and no tokenizer can encode."""
    for text in _strings(value):
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(
                f"text contains U+{ord(text[exc.start]):04X} at position {exc.start}, half of a surrogate pair",
                param="messages",
            ) from exc


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
