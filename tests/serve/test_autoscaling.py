"""The Serve shell of the scaling policy, called as Serve's controller calls it."""

from __future__ import annotations

import json
import logging
import math
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

with warnings.catch_warnings():
    # Serve's own models trip over a deprecation of pydantic's as they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
    from ray.serve._private.common import (
        DeploymentID,
        ReplicaID,
        ReplicaMetricReport,
        TimeStampedValue,
    )
    from ray.serve._private.config import DeploymentConfig, ReplicaConfig
    from ray.serve._private.deployment_info import DeploymentInfo
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

    from deployments.autoscaling import (
        METRICS,
        STALE_AFTER_S,
        AlertSettings,
        WorkAutoscaling,
        autoscaling_config,
    )

from deployments.scaling import ScalingRules, SurgeRule
from deployments.scaling_alert import TRIES, WebhookAlert

MODEL = DeploymentID(name="Model", app_name="seedance")
RULES = ScalingRules(target_tokens_per_replica=1000, upscale_cooldown_s=10, downscale_cooldown_s=20)
IDLE = dict.fromkeys(METRICS, 0.0)
SURGING = IDLE | {"ttft_p95_ms": 900.0, "cpu_percent": 95.0, "waiting": 4.0}


class Controller:
    """Serve's own autoscaling state with a fake clock: replicas report, a count comes out."""

    def __init__(
        self,
        rules: ScalingRules = RULES,
        alert: AlertSettings | None = None,
        *,
        low: int = 1,
        high: int = 5,
    ) -> None:
        self.config = autoscaling_config(
            min_replicas=low,
            max_replicas=high,
            target_requests_per_replica=16,
            rules=rules,
            alert=alert,
        )
        assert self.config.policy.policy_function == "deployments.autoscaling:WorkAutoscaling"
        self.now_s = 1000.0
        self.policy = WorkAutoscaling(**self.config.policy.policy_kwargs, clock=lambda: self.now_s)
        self.state: dict[str, Any] = {}
        self.target = low
        self.reports: dict[ReplicaID, list[tuple[float, dict[str, float]]]] = {}
        self.running: list[ReplicaID] = []
        self.open_sockets = 0
        for _ in range(low):
            self.start()

    def start(self) -> ReplicaID:
        replica = ReplicaID(unique_id=f"r{len(self.reports)}", deployment_id=MODEL)
        self.running.append(replica)
        self.reports[replica] = []
        return replica

    def report(self, *loads: dict[str, float]) -> None:
        """The running replicas' next samples, in order; those left over send nothing."""
        for replica, load in zip(self.running, loads, strict=False):
            self.reports[replica] = [*self.reports[replica], (self.now_s + 5e8, load)][-5:]

    def tick(self, after_s: float = 1.0) -> int:
        self.now_s += after_s
        replicas, state = self.policy(self.context())
        assert isinstance(replicas, int)
        self.state, self.target = state, replicas
        return replicas

    def context(self) -> AutoscalingContext:
        raw = {
            metric: {
                replica: [
                    TimeStampedValue(at, load[metric]) for at, load in samples if metric in load
                ]
                for replica, samples in self.reports.items()
                if replica in self.running and any(metric in load for _, load in samples)
            }
            for metric in METRICS
        }
        means = {
            metric: {
                replica: sum(sample.value for sample in series) / len(series)
                for replica, series in by_replica.items()
            }
            for metric, by_replica in raw.items()
        }
        return AutoscalingContext(
            deployment_id=MODEL,
            deployment_name=MODEL.name,
            app_name=MODEL.app_name,
            current_num_replicas=len(self.running),
            target_num_replicas=self.target,
            running_replicas=self.running,
            total_num_requests=float(self.open_sockets),
            total_queued_requests=0.0,
            aggregated_metrics=lambda: means,
            raw_metrics=lambda: raw,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=dict(self.state),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=None,
            config=self.config,
        )


class Receiver:
    """A webhook receiver on a real port."""

    def __init__(self, *replies: int | float) -> None:
        """A reply is a status, or a time in seconds to stay silent for."""
        self.bodies: list[dict[str, Any]] = []
        self.arrived = threading.Semaphore(0)
        self.release = threading.Event()
        receiver, left = self, list(replies)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                reply = left.pop(0) if left else 204
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/json"
                receiver.bodies.append(json.loads(body))
                receiver.arrived.release()
                if isinstance(reply, float):
                    receiver.release.wait(reply)
                    return
                self.send_response(reply)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=secret"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def test_work_is_followed_from_one_to_three_replicas_and_back() -> None:
    controller = Controller()
    controller.report(IDLE | {"tokens": 2500.0})
    assert controller.tick() == 3
    controller.start()
    controller.start()
    seen = []
    for _ in range(60):
        controller.report(*[IDLE | {"tokens": 10.0}] * len(controller.running))
        seen.append(controller.tick())
        del controller.running[seen[-1] :]
    assert [seen.index(2), seen.index(1)] == [20, 40]


def test_open_sockets_and_buses_count_for_nothing() -> None:
    controller = Controller()
    controller.open_sockets = 200
    for _ in range(100):
        controller.report(IDLE)
        assert controller.tick() == 1


def test_between_two_decisions_the_count_stands() -> None:
    controller = Controller()
    controller.report(IDLE)
    controller.tick()
    for _ in range(5):
        controller.report(IDLE | {"tokens": 50_000.0})
        assert controller.tick(0.1) == 1
    assert controller.tick(0.6) > 1


def test_a_replica_that_never_reported_stops_scaling_until_it_does() -> None:
    controller = Controller(low=2)
    for _ in range(50):
        controller.report(IDLE | {"tokens": 5000.0})
        assert controller.tick() == 2
    controller.report(IDLE | {"tokens": 5000.0}, IDLE)
    assert controller.tick() == 5


def test_a_replica_that_fell_silent_stops_scaling_by_our_own_clock() -> None:
    controller = Controller(low=2)
    controller.report(IDLE, IDLE)
    controller.tick()
    controller.report(*[IDLE | {"tokens": 0.0}] * 2)
    silent_since_s = controller.now_s
    while controller.now_s - silent_since_s < STALE_AFTER_S:
        controller.report(IDLE)
        controller.tick()
    controller.report(IDLE | {"tokens": 5000.0})
    assert controller.tick() == 2, "its last report is too old to decide on"


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_sample_that_is_no_number_stops_scaling(fault: float) -> None:
    controller = Controller()
    controller.report(IDLE | {"tokens": 5000.0, "cpu_percent": fault})
    assert controller.tick() == 1


@pytest.mark.parametrize("missing", METRICS)
def test_an_incomplete_report_stops_scaling(missing: str) -> None:
    controller = Controller()
    load = IDLE | {"tokens": 5000.0}
    del load[missing]
    controller.report(load)
    assert controller.tick() == 1


def test_it_says_once_that_it_is_blind(caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller()
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        logging.getLogger("ray.serve").addHandler(caplog.handler)
        try:
            for _ in range(10):
                controller.tick()
        finally:
            logging.getLogger("ray.serve").removeHandler(caplog.handler)
    said = {record.getMessage() for record in caplog.records}
    assert len(said) == 1
    assert "stays at 1 replicas: 1 of 1 replicas sent no usable load (r0)" in said.pop()


def test_an_error_of_its_own_never_reaches_the_controller() -> None:
    controller = Controller()
    controller.report(IDLE | {"tokens": 5000.0})
    context = controller.context()
    context.running_replicas = None  # type: ignore[assignment]
    replicas, state = controller.policy(context)
    assert replicas == 1
    assert isinstance(state, dict)


def test_a_surge_calls_the_webhook_once_and_goes_on_deciding(receiver: Receiver) -> None:
    rules = ScalingRules(target_tokens_per_replica=1000, surge=SurgeRule())
    controller = Controller(rules, AlertSettings(url=receiver.url, interval_s=60))
    for _ in range(30):
        controller.report(*[SURGING] * len(controller.running))
        controller.tick()
    assert controller.target == 3
    assert controller.policy.alert is not None
    controller.policy.alert.join(30)
    assert len(receiver.bodies) == 1
    body = receiver.bodies[0]
    assert (body["alert"], body["deployment"], body["application"]) == (
        "surge",
        "Model",
        "seedance",
    )
    assert (body["replicas"], body["wanted"], body["max_replicas"]) == (1, 3, 5)
    assert (body["ttft_p95_ms"], body["cpu_percent"], body["waiting"]) == (900, 95, 4)


def test_a_webhook_that_hangs_holds_up_no_decision() -> None:
    receiver = Receiver(60.0)
    try:
        rules = ScalingRules(surge=SurgeRule())
        controller = Controller(rules, AlertSettings(url=receiver.url, interval_s=0))
        for _ in range(20):
            controller.report(*[SURGING] * len(controller.running))
            controller.tick()
        assert receiver.arrived.acquire(timeout=30)
        assert controller.target == 3
        assert len(receiver.bodies) == 1, "one alert is under way, the others are dropped"
    finally:
        receiver.close()


def alert_to(url: str, **options: Any) -> WebhookAlert:
    options = {"interval_s": 0.0, "timeout_s": 5.0, "retry_after_s": 0.01} | options
    return WebhookAlert(url, logger=logging.getLogger("tests.alert"), **options)


def test_alerts_are_limited_to_one_an_interval(receiver: Receiver) -> None:
    now_s = [0.0]
    alert = alert_to(receiver.url, interval_s=300.0, clock=lambda: now_s[0])
    sent = []
    for now_s[0] in (0, 1, 299, 300, 301):
        sent.append(alert.send({"alert": "surge"}))
        alert.join(30)
    assert sent == [True, False, False, True, False]
    assert len(receiver.bodies) == 2


def test_a_refused_alert_is_tried_again_and_the_url_stays_out_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = Receiver(503, 302, 204)
    try:
        alert = alert_to(receiver.url)
        with caplog.at_level(logging.INFO, logger="tests.alert"):
            alert.send({"alert": "surge"})
            alert.join(30)
        assert receiver.bodies == [{"alert": "surge"}] * 3
        assert "refused by 127.0.0.1: 503" in caplog.text
        assert "sent to 127.0.0.1: 204" in caplog.text
        assert "secret" not in caplog.text
    finally:
        receiver.close()


def test_a_receiver_that_is_gone_is_logged_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    receiver.close()
    alert = alert_to(receiver.url)
    with caplog.at_level(logging.INFO, logger="tests.alert"):
        assert alert.send({"alert": "surge"})
        alert.join(30)
    assert caplog.text.count("alert not sent to 127.0.0.1") == TRIES


def test_a_receiver_that_never_answers_is_left_after_the_timeout() -> None:
    receiver = Receiver(60.0, 60.0, 60.0)
    try:
        alert = alert_to(receiver.url, timeout_s=0.05)
        started_s = time.monotonic()
        alert.send({"alert": "surge"})
        alert.join(30)
        assert time.monotonic() - started_s < 30
    finally:
        receiver.close()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "host/x", "http://"])
def test_only_web_addresses_are_taken(url: str) -> None:
    with pytest.raises(ValueError, match="must be http or https"):
        alert_to(url)


def test_serves_own_machinery_takes_the_config_and_calls_the_policy() -> None:
    """Ray's state object as the controller uses it, with reports as replicas send them."""
    config = autoscaling_config(
        min_replicas=1, max_replicas=4, target_requests_per_replica=16, rules=RULES
    )
    state = DeploymentAutoscalingState(MODEL)
    assert state.register(_deployment_info(config), 1) == 1
    replica = ReplicaID(unique_id="r0", deployment_id=MODEL)
    state.update_running_replica_ids([replica])
    assert state.get_decision_num_replicas(1) == 1, "nothing was heard"
    now = time.time()
    state.record_request_metrics_for_replica(
        ReplicaMetricReport(
            replica_id=replica,
            timestamp=now,
            metrics={
                metric: [TimeStampedValue(now, 2500.0 if metric == "tokens" else 0.0)]
                for metric in METRICS
            },
        )
    )
    decided = 1
    deadline_s = time.monotonic() + 30
    while decided == 1 and time.monotonic() < deadline_s:
        decided = state.get_decision_num_replicas(1)
        time.sleep(0.05)
    assert decided == 3


def test_the_config_survives_the_way_that_serve_rebuilds_it() -> None:
    """An operator's `deployments:` section makes the controller build it anew from a mapping."""
    config = autoscaling_config(
        min_replicas=1,
        max_replicas=4,
        target_requests_per_replica=16,
        rules=ScalingRules(surge=SurgeRule()),
        alert=AlertSettings(url="http://127.0.0.1/hook"),
    )
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):
        rebuilt = AutoscalingConfig(**pickle.loads(pickle.dumps(config.model_dump())))
    assert rebuilt == config
    assert rebuilt.policy.get_policy()(**rebuilt.policy.policy_kwargs).alert is not None


def test_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="max_replicas"):
        autoscaling_config(
            min_replicas=3, max_replicas=2, target_requests_per_replica=16, rules=RULES
        )


def _deployment_info(config: AutoscalingConfig) -> DeploymentInfo:
    return DeploymentInfo(
        deployment_config=DeploymentConfig(autoscaling_config=config),
        replica_config=ReplicaConfig.create(lambda: None),
        start_time_ms=0,
        deployer_job_id="",
    )
