"""Keeps a board of the replicas of a deployment without a handle to it.

HAProxy routes to the ingress itself, so Serve allows it no router of ours; what the
controller tells every router, it tells us too.
"""

from __future__ import annotations

import asyncio

from ray.serve._private.common import DeploymentID, DeploymentTargetInfo
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.context import _get_global_client

from deployments.replica_board import ReplicaBoard, board_of


def watch_replicas(deployment: str, app_name: str, client_id: str) -> ReplicaBoard:
    """The deployment's board, kept up to date from now on by the running event loop."""
    board = board_of(deployment)

    def update(targets: DeploymentTargetInfo) -> None:
        board.set_replicas(replica.replica_id.unique_id for replica in targets.running_replicas)

    LongPollClient(
        _get_global_client()._controller,
        {(LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID(deployment, app_name)): update},
        call_in_event_loop=asyncio.get_running_loop(),
        client_id=client_id,
    )
    return board
