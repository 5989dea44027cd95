"""The one place for settings: `args:` of `serve_config.yaml`, checked, and handed down.

Nothing below this file reads the environment or a file of its own. Unknown keys
and values out of range are refused with the key's name, because Serve itself
ignores what it does not know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

Sha256Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
TenantName = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")
]


class SettingsError(ValueError):
    """The settings cannot be used; the message names each key at fault."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ModelSettings(_Section):
    """The chat model and the engine that runs it."""

    name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """Hugging Face id, or a folder with config.json, tokenizer and safetensors."""
    served_name: str | None = Field(default=None, min_length=1, max_length=256)
    """Model id that clients use; null: `name`."""
    backend: Literal["transformers", "vllm", "mock"] = "transformers"
    """`transformers`: our engine; `vllm`: that of vLLM, where it is installed; `mock` emits a canned answer through the real scheduler: front ends need no weights."""
    mock_token_interval_s: float = Field(default=0.1, ge=0, le=60)
    """Time between two tokens of the mock."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto`, `cpu`, `cuda` or `cuda:N`; auto is CUDA where there is any."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto is bfloat16 where the hardware computes it, else float32."""
    quantization: Literal["none", "int8"] = "none"
    """`int8`: on an x86 CPU, weights and products of 8 bits; faster, and nearly the same answers."""
    kv_cache_gib: float | None = Field(default=None, gt=0, le=1_000_000)
    """KV memory of one replica at the most; null: half of the machine's, up to 8 GiB, or most of a GPU's."""
    cuda_graphs: bool = True
    """On CUDA: record the steps that only decode and play them back."""
    compile: bool = False
    """On CUDA: torch.compile for the forward; takes a minute and a C compiler at start."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of one replica; null: all cores but one, which Serve's processes need."""
    max_num_seqs: int = Field(default=16, ge=1, le=1024)
    """Requests that one replica computes at the same time."""
    max_model_len: int | None = Field(default=None, ge=16, le=10_000_000)
    """Longest prompt + answer, in tokens; null: what the model was trained for."""
    max_num_batched_tokens: int = Field(default=384, ge=257, le=1_000_000)
    """Tokens of one step; more prefill faster and pause streams longer. At least `max_num_seqs` + 256."""
    prefill_slowdown: float = Field(default=2.0, ge=0, le=1000)
    """Target for the time between two tokens of a stream beside prompts, as a multiple of its usual one (1 or more); 0: none."""
    speculative_tokens: int = Field(default=7, ge=0, le=64)
    """Longest guess at the next tokens of an answer that repeats its prompt or itself; wrong ones change nothing; 0: none."""
    max_speculative_rows: int = Field(default=8, ge=0, le=4096)
    """Tokens of one step's answers, guesses included; with more answers at a time there are no guesses."""
    max_waiting: int = Field(default=256, ge=1, le=1_000_000)
    """Requests queued in one replica; one more is refused with `overloaded`."""
    max_waiting_tokens: int = Field(default=0, ge=0, le=10_000_000_000)
    """Prompt tokens queued in one replica; 0: 16 of the longest prompts."""
    num_replicas: int = Field(default=1, ge=1, le=10_000)
    """Model replicas at start."""
    num_cpus: float = Field(default=1, ge=0, le=1024)
    """Cores that Ray sets aside for one replica."""
    num_gpus: float | None = Field(default=None, ge=0, le=64)
    """GPUs of one replica; null: one where the cluster has any."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        for name, only in (("device", "auto"), ("quantization", "none")):
            value = getattr(self, name)
            if self.backend == "vllm" and value != only:
                raise PydanticCustomError(
                    "backend",
                    "{name} is {value}, backend vllm takes {only}",
                    {"name": name, "value": value, "only": only},
                )
        return self


class StoreSettings(_Section):
    """Where the cache keeps its answers."""

    kind: Literal["memory", "sqlite", "redis"] = "sqlite"
    """`sqlite`: a file on this machine; `redis`: a Redis or Valkey server that replicas share; `memory`: nothing stays."""
    path: Path | None = Field(default=None, strict=False)
    """The file of `sqlite`; null: `cache/NAME.sqlite3` in `home`."""
    url: str | None = Field(
        default=None, pattern=r"^(rediss?|unix)://[^\s]+$", max_length=2048, repr=False
    )
    """The server of `redis`, such as redis://:PASSWORD@host:6379/0, or rediss:// with TLS."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Replicas of one name share their answers; null: the application's name."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.kind == "redis") != (self.url is not None):
            needs = "needs a url" if self.kind == "redis" else "takes no url"
            raise PydanticCustomError("store", f"kind {self.kind} {needs}")
        if self.path is not None and self.kind != "sqlite":
            raise PydanticCustomError("store", f"kind {self.kind} takes no path")
        return self


class CacheSettings(_Section):
    """The semantic prompt cache."""

    enabled: bool = True
    """Off: every request goes to the model."""
    semantic: bool = True
    """Off: only equal prompts hit, and no embedder is loaded."""
    semantic_threshold: float = Field(default=0.95, gt=0, le=1)
    """Least cosine similarity of a semantic hit, which the guards must let pass too."""
    verifier: Literal["on", "off"] = "on"
    """Off, or with another embedder than the default: semantic hits are of the same wording only."""
    max_wrong_rate: float = Field(default=0.01, gt=0, le=0.5)
    """Share of the requests without an equal question that may get a wrong answer by the verifier."""
    coalesce_similar: bool = True
    """Whether a question waits for the answer to one that means the same and is running; off: an equal one's only."""
    check_rate: float = Field(default=0.1, gt=0, le=1)
    """Least share of answers given by the verifier that the model answers too, to compare, when idle."""
    ttl_s: float = Field(default=3600, gt=0, le=31_536_000)
    """Life of an answer, wherever it is held; a hit never extends it."""
    warm_s: float = Field(default=900, gt=0, le=31_536_000)
    """Longest stay in the warm tier, from when an answer was stored or came back from the cold one."""
    max_bytes: int = Field(default=64 * 2**20, ge=2**10, le=2**40)
    """Memory of the warm tier."""
    cold_bytes: int = Field(default=64 * 2**20, ge=0, le=2**44)
    """Size of the cold tier, which keeps one answer of those that ask the same; 0: none."""
    tenant_max_bytes: int | None = Field(default=None, ge=2**10, le=2**44)
    """Most that one tenant may hold in each tier; null: no bound of its own."""
    tenant_max_entries: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Most answers that one tenant may hold in each tier; null: no bound."""
    tenant_stores_per_s: float | None = Field(default=50.0, gt=0, le=1_000_000)
    """New answers of one tenant that are kept, with bursts up to a thousand; null: all."""
    policy: Literal["windowed", "lru-k", "s3-fifo", "lru"] = "windowed"
    """Which answers leave a tier when space is short."""
    max_entry_bytes: int = Field(default=2**20, ge=2**10, le=2**30)
    """A longer answer is not kept."""
    front_bytes: int = Field(default=16 * 2**20, ge=0, le=2**40)
    """Memory of the answers that each ingress holds itself for equal requests; 0: none."""
    embedder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """Hugging Face id or folder of a sentence-transformers model."""
    embed_timeout_s: float = Field(default=0.15, gt=0, le=10)
    """A slower embedding makes the look-up a miss."""
    lookup_timeout_s: float = Field(default=0.05, gt=0, le=10)
    """On top of the embedding; past it the request goes to the model."""
    epoch: int = Field(default=0, ge=0)
    """Raise it to forget everything at once."""
    num_replicas: int = Field(default=1, ge=1, le=1000)
    """Cache replicas; they share the store, so that each gives what another has kept."""
    store: StoreSettings = StoreSettings()

    @model_validator(mode="after")
    def _replicas_share(self) -> Self:
        has_store = self.store.kind != "memory" and self.cold_bytes > 0
        if self.num_replicas > 1 and not has_store:
            raise PydanticCustomError(
                "replicas",
                f"num_replicas is {self.num_replicas}: several need a store of kind sqlite or "
                "redis, and cold_bytes above 0",
            )
        return self


class LimitSettings(_Section):
    """Bounds on what one client may ask for."""

    max_body_bytes: int = Field(default=2**20, ge=2**10, le=2**30)
    """One HTTP body or WebSocket message."""
    max_connections: int = Field(default=2000, ge=1, le=1_000_000)
    """WebSockets of one ingress replica."""
    max_live_requests: int = Field(default=64, ge=1, le=4096)
    """Unfinished requests of one WebSocket."""
    accept_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Time a model replica has to accept a request before the client is told to retry."""
    max_pending_requests: int = Field(default=4096, ge=1, le=1_000_000)
    """Unfinished requests of one ingress replica that the model works on."""
    watchdog_s: float = Field(default=5.0, ge=0.5, le=600)
    """A model replica that is silent, or makes no step, for so long loses its streams to another."""
    failover_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Time to find another replica for a stream whose replica was lost."""
    max_failovers: int = Field(default=2, ge=0, le=100)
    """Replicas that a stream may lose in a row, without a token between, before it fails."""
    orphan_lease_s: float = Field(default=1.5, ge=0.5, le=600)
    """Time that a stream is computed on after its ingress was lost, for another to take it over."""
    resume_window_s: float = Field(default=30.0, ge=0, le=3600)
    """Time that a stream can be resumed after its connection was lost, and after its end; 0: never."""
    drain_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Time that running streams have to end when their replica is replaced or scaled away."""
    heartbeat_s: float = Field(default=15.0, gt=0, le=600)
    """PING interval of a WebSocket, and longest silence of an event stream."""
    unread_timeout_s: float = Field(default=30.0, ge=0.1, le=3600)
    """A WebSocket that takes nothing of what waits for it for so long is closed with 4410."""
    window_tokens: int = Field(default=256, ge=1, le=65_536)
    """Tokens that a stream is ahead of a client that acknowledges, where the client names no window."""
    input_buffer_bytes: int = Field(default=256 * 2**10, ge=2**10, le=2**30)
    """Text of a chunked prompt that may wait for the model."""
    max_input_bytes: int = Field(default=4 * 2**20, ge=2**10, le=2**30)
    """All pieces of one chunked prompt."""


class RoutingSettings(_Section):
    """Which model replica gets a request."""

    policy: Literal["prefix", "default"] = "prefix"
    """`prefix`: the one that holds the longest prefix of the prompt; `default`: Serve's own choice."""
    margin_tokens: int = Field(default=2048, ge=0, le=1_000_000_000)
    """How much more work, in tokens, than the least busy replica such a one may have."""


class KeySettings(_Section):
    """One API key. The key itself never stands in a file: only its SHA-256 does."""

    tenant: TenantName
    sha256: Sha256Hex
    admin: bool = False
    """Whether it may look at and change what the cache holds, of all tenants."""


class AuthSettings(_Section):
    """Who may ask. Without keys everyone may, as the tenant `default`."""

    keys: tuple[KeySettings, ...] = ()
    """API keys as `{tenant, sha256, admin}`; `seedance keys hash TENANT` makes one."""
    allow_anonymous: bool | None = None
    """Whether one without a key may ask, as the tenant `default`; null: only where there is no key."""
    allow_open: bool = False
    """Whether to serve without any key where other machines reach the server; else it does not start."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of browser pages besides our own, such as "https://chat.example.org"; "*" is any."""

    @field_validator("keys")
    @classmethod
    def _are_distinct(cls, keys: tuple[KeySettings, ...]) -> tuple[KeySettings, ...]:
        """A key that stood for two tenants would silently be the last one's."""
        places: dict[str, int] = {}
        for place, key in enumerate(keys):
            first = places.setdefault(key.sha256, place)
            if first != place:
                raise PydanticCustomError(
                    "same_key", f"entries {first} and {place} have the same sha256"
                )
        return keys


class AccountSettings(_Section):
    """The store of tenants, keys and usage, and the limits of tenants that have none there."""

    url: str | None = Field(
        default=None, pattern=r"^(sqlite|postgres(ql)?)[+\w]*://", max_length=2048, repr=False
    )
    """sqlite:////FILE or postgresql://USER:PASSWORD@HOST/DATABASE; null: `accounts.sqlite3` in `home`."""
    pool_size: int = Field(default=2, ge=1, le=1000)
    """Connections that one ingress keeps to the store."""
    pool_overflow: int = Field(default=4, ge=0, le=1000)
    """How many more it may open for a while."""
    pool_timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Longest wait for one of them."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Longest wait for the store, by nothing but `/v1/usage` and tasks of our own."""
    refresh_s: float = Field(default=2.0, gt=0, le=3600)
    """How often an ingress looks for new and revoked keys."""
    flush_s: float = Field(default=5.0, gt=0, le=3600)
    """How often an ingress writes the usage down."""
    requests_per_minute: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Of one tenant at one ingress replica; null: any. `seedance keys limit` sets a tenant's own."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=1_000_000_000_000)
    """Prompts and answers, but for those that the cache gave; null: any."""
    concurrent_requests: int | None = Field(default=None, ge=1, le=1_000_000)
    """Unfinished requests; null: any."""


class AutoscalingSettings(_Section):
    """Model replicas by the work there is; off: `model.num_replicas` of them."""

    enabled: bool = False
    """On: `model.num_replicas` is not read."""
    min_replicas: int = Field(default=1, ge=1, le=10_000)
    """Model replicas without any work."""
    max_replicas: int = Field(default=4, ge=1, le=10_000)
    """Most model replicas."""
    target_tokens_per_replica: int = Field(default=16_384, ge=1, le=1_000_000_000)
    """Tokens still to be computed, prompts and answers, that one replica should hold."""
    target_requests_per_replica: float | None = Field(default=None, gt=0, le=1_000_000)
    """Requests, running or waiting, that one replica should hold; null: `model.max_num_seqs`."""
    upscale_cooldown_s: float = Field(default=30.0, ge=0, le=86_400)
    """Least time between two additions."""
    downscale_cooldown_s: float = Field(default=300.0, ge=0, le=86_400)
    """Time that the load must fit fewer replicas before one leaves, and then the next."""
    max_step_up: int = Field(default=4, ge=1, le=10_000)
    """Most replicas added at once."""
    surge_replicas: int = Field(default=2, ge=0, le=10_000)
    """Replicas added when all three limits below are exceeded; 0 adds none and sends no alert."""
    surge_ttft_p95_ms: float = Field(default=800.0, ge=0, le=3_600_000)
    """95th percentile of the time to the first token, of the slowest replica in the last minute."""
    surge_cpu_percent: float = Field(default=85.0, ge=0, le=100)
    """CPU load of the model replicas, of the cores that they compute with."""
    surge_waiting: float = Field(default=3.0, ge=0, le=1_000_000)
    """Requests that wait, over all replicas."""
    alert_url: str | None = Field(
        default=None, pattern=r"^https?://[^/?#\s]+[^\s]*$", max_length=2048
    )
    """Where a surge is posted as JSON; null: nowhere. It appears in Serve's logs."""
    alert_interval_s: float = Field(default=300.0, ge=1, le=86_400)
    """Least time between two alerts."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise PydanticCustomError(
                "bounds",
                f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}",
            )
        return self


class IngressSettings(_Section):
    """The processes that clients talk to."""

    num_replicas: int = Field(default=1, ge=1, le=10_000)
    """Ingress replicas, or the least of them with `max_replicas`."""
    max_replicas: int | None = Field(default=None, ge=1, le=10_000)
    """Most ingress replicas, by their live generations; null: always `num_replicas`."""
    target_generations: int = Field(default=500, ge=1, le=1_000_000)
    """Live generations that one ingress replica should hold."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise PydanticCustomError(
                "bounds",
                f"max_replicas is {self.max_replicas}, below num_replicas {self.num_replicas}",
            )
        return self


class Settings(_Section):
    """Everything that an operator may set."""

    home: Path = Field(default=Path("~/.cache/seedance"), strict=False)
    """Where prepared models lie."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Of all replicas."""
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    limits: LimitSettings = LimitSettings()
    routing: RoutingSettings = RoutingSettings()
    auth: AuthSettings = AuthSettings()
    accounts: AccountSettings = AccountSettings()
    ingress: IngressSettings = IngressSettings()
    autoscaling: AutoscalingSettings = AutoscalingSettings()


def parse_settings(args: dict[str, Any]) -> Settings:
    """Checks the `args:` of the application.

    Raises:
        SettingsError: names every key that is unknown, of the wrong type or out of range.
    """
    try:
        # YAML has lists where the settings have tuples; JSON mode takes one for the other
        # and stays strict about everything else. NaN and dates go on to the check, which
        # knows their key.
        return Settings.model_validate_json(json.dumps(args, default=str))
    except ValidationError as exc:
        faults = (_fault(error) for error in exc.errors(include_url=False))
        raise SettingsError("settings: " + "; ".join(faults)) from None
    except (TypeError, ValueError, RecursionError) as exc:
        raise SettingsError(f"settings: not plain YAML values: {exc}") from None


def _fault(error: ErrorDetails) -> str:
    """What is wrong with one key, with the value that it has."""
    key = ".".join(str(part) for part in error["loc"]) or "args"
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    what = error["msg"][:1].lower() + error["msg"][1:]
    value = error["input"]
    # What stands in the place of a digest may be the key itself.
    is_secret = key.startswith(("auth.keys", "cache.store.url", "accounts.url"))
    is_shown = isinstance(value, bool | int | float | str) and not is_secret
    return f"{key}: {what}, got {json.dumps(value)[:80]}" if is_shown else f"{key}: {what}"


def settings_table(section: type[BaseModel] = Settings, prefix: str = "") -> str:
    """All keys as rows of a Markdown table; docs/operations.md holds them, and a test compares."""
    rows = ""
    for name, field in section.model_fields.items():
        default = field.default
        if isinstance(default, BaseModel):
            rows += settings_table(type(default), f"{prefix}{name}.")
        else:
            shown = json.dumps(
                list(default) if isinstance(default, tuple) else default, default=str
            )
            rows += f"| `{prefix}{name}` | `{shown}` | {field.description or ''} |\n"
    return rows


if __name__ == "__main__":
    print(settings_table(), end="")
