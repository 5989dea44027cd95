"""The other side of `stdio`: starts workers, asks them, and reads what they used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from bench.peers.stdio import Request

ROOT = Path(__file__).resolve().parent.parent.parent
STOPPED_WITHIN_S = 15.0
LOG_LINES = 6
LINE_LIMIT = 2**20
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


class WorkerFailed(Exception):
    """A worker did not start, or ended before its answers did; the message ends with its log."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine as it is started: `name` is what tables call it.

    Attributes:
        module: of `bench.peers`.
        python: of the environment that the engine is installed in.
        model: the folder it loads.
        processes, threads: so many workers share the load, with so many threads each.
    """

    name: str
    module: str
    python: str
    model: str
    precision: str
    processes: int
    threads: int
    max_seqs: int = 32


def worker_command(spec: EngineSpec) -> list[str]:
    return [
        spec.python, "-m", f"bench.peers.{spec.module}",
        "--model", spec.model,
        "--threads", str(spec.threads),
        "--precision", spec.precision,
        "--max-seqs", str(spec.max_seqs),
    ]  # fmt: skip


def worker_environment(spec: EngineSpec) -> dict[str, str]:
    """What a worker's environment has beside this one's."""
    environment = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    if spec.module == "vllm":
        # As its installation guide wants it, where they are.
        wanted = [Path(spec.python).parent.parent / "lib" / "libiomp5.so", TCMALLOC]
        if found := [str(library) for library in wanted if library.exists()]:
            environment["LD_PRELOAD"] = ":".join(found)
    return environment


@dataclass
class Sample:
    """What came of one request; seconds by `time.monotonic`, which all processes share."""

    request: Request
    begun_s: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    token_ids: list[int] = field(default_factory=list)
    ended_s: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Used:
    """What a worker and its children hold and have used."""

    cpu_s: float
    peak_rss: int
    """Bytes, since they began; what they share counts for each."""
    pss: int
    """Bytes now; what they share counts once."""


class Worker:
    """One started worker. Made by `start`, which returns once it is ready."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes], begun_s: float) -> None:
        self._process = process
        self._log = log
        self.begun_s = begun_s
        """When its process was started."""
        self.facts: dict[str, Any] = {}
        """What it said of itself when it was ready."""
        self._asked: dict[int, tuple[Sample, asyncio.Event]] = {}
        self._is_ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self.failure: str | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        ready_within_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Worker:
        """Starts a worker in a group of its own.

        Args:
            environment: beside this process's.
            cores: it may run on; none: on all that this process may use.

        Raises:
            WorkerFailed: it ended, or was not ready in time.
        """
        # Held open as long as the worker: it has no name and goes with it.
        log = tempfile.TemporaryFile()  # noqa: SIM115
        begun_s = clock()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_LIMIT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        except OSError as exc:
            log.close()
            raise WorkerFailed(f"{command[0]} does not start: {exc}") from exc
        if cores:
            os.sched_setaffinity(process.pid, cores)
        worker = cls(process, log, begun_s)
        try:
            async with asyncio.timeout(ready_within_s):
                await worker._is_ready.wait()
        except TimeoutError:
            await worker.stop()
            raise WorkerFailed(f"not ready within {ready_within_s:g} s{worker.log_end()}") from None
        if worker.failure is not None:
            await worker.stop()
            raise WorkerFailed(worker.failure)
        return worker

    @property
    def num_asked(self) -> int:
        """Requests without an end."""
        return len(self._asked)

    async def ask(self, request: Request, begun_s: float) -> Sample:
        """Asks, and returns when the answer ended, one way or another."""
        sample = Sample(request, begun_s)
        if self.failure is not None:
            sample.error = self.failure
            return sample
        ended = asyncio.Event()
        self._asked[request.id] = sample, ended
        assert self._process.stdin is not None, "a pipe"
        with contextlib.suppress(OSError):  # The reader notices that it died.
            self._process.stdin.write(request.to_line().encode())
            await self._process.stdin.drain()
        try:
            await ended.wait()
        finally:
            self._asked.pop(request.id, None)
        return sample

    def used(self) -> Used:
        """Reads the clocks and the memory of the worker and all its children."""
        cpu_s, peak_rss, pss = 0.0, 0, 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                cpu_s += times.user + times.system + times.children_user + times.children_system
                peak_rss += _peak_rss(process.pid)
                pss += process.memory_full_info().pss
        return Used(cpu_s, peak_rss, pss)

    async def stop(self) -> None:
        """Ends the input, waits, and ends whatever of its group is still there."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOPPED_WITHIN_S if self._is_ready.is_set() else 0.1):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._reading
        self._log.close()

    def _tree(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.Error:
            return []

    async def _read(self) -> None:
        assert self._process.stdout is not None, "a pipe"
        try:
            while line := await self._process.stdout.readline():
                self._take(json.loads(line))
            self.failure = f"the worker ended with status {await self._process.wait()}"
        except (ValueError, KeyError) as exc:
            self.failure = f"the worker wrote what is no reply ({exc})"
        self.failure += self.log_end()
        self._is_ready.set()
        for sample, ended in self._asked.values():
            sample.error = self.failure
            ended.set()

    def _take(self, reply: dict[str, Any]) -> None:
        if "ready" in reply:
            self.facts = reply["ready"]
            self._is_ready.set()
            return
        if (asked := self._asked.get(reply["id"])) is None:
            return
        sample, ended = asked
        if "n" in reply:
            sample.pieces.append((reply["t"], reply["n"]))
            sample.token_ids += reply["token_ids"]
            return
        sample.error = reply.get("error")
        sample.ended_s = reply.get("t")
        if sample.error is None and len(sample.token_ids) != sample.request.max_tokens:
            wanted = sample.request.max_tokens
            sample.error = f"{len(sample.token_ids)} tokens came, {wanted} were asked for"
        ended.set()

    def log_end(self) -> str:
        """The last lines that it wrote to standard error, each on a line of its own."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "".join(f"\n    {line[:300]}" for line in lines[-LOG_LINES:])


class Fleet:
    """Workers of one engine that share its load: who has the fewest requests gets the next."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers

    @classmethod
    async def start(cls, spec: EngineSpec, ready_within_s: float = 300.0) -> Fleet:
        """Starts all workers of an engine; several have cores of their own.

        Raises:
            WorkerFailed: one of them is not ready.
        """
        here = sorted(os.sched_getaffinity(0))
        starts = [
            Worker.start(
                worker_command(spec),
                environment=worker_environment(spec),
                cores=_part(here, index, spec.threads) if spec.processes > 1 else (),
                ready_within_s=ready_within_s,
            )
            for index in range(spec.processes)
        ]
        started = await asyncio.gather(*starts, return_exceptions=True)
        workers = [each for each in started if isinstance(each, Worker)]
        for each in started:
            if isinstance(each, BaseException):
                await cls(workers).stop()
                raise each
        return cls(workers)

    @property
    def begun_s(self) -> float:
        return min(worker.begun_s for worker in self.workers)

    @property
    def facts(self) -> dict[str, Any]:
        return self.workers[0].facts

    @property
    def failure(self) -> str | None:
        return next((each.failure for each in self.workers if each.failure is not None), None)

    def log_end(self) -> str:
        return "".join(worker.log_end() for worker in self.workers)

    async def ask(self, request: Request, begun_s: float) -> Sample:
        worker = min(self.workers, key=lambda each: each.num_asked)
        return await worker.ask(request, begun_s)

    def used(self) -> Used:
        each = [worker.used() for worker in self.workers]
        return Used(
            sum(used.cpu_s for used in each),
            sum(used.peak_rss for used in each),
            sum(used.pss for used in each),
        )

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))


def _part(cores: list[int], index: int, count: int) -> list[int]:
    """The cores of one worker of several; they wrap around where there are too few."""
    return sorted({cores[(index * count + each) % len(cores)] for each in range(count)})


def _peak_rss(pid: int) -> int:
    """The kernel's own record, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
