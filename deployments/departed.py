"""Replicas that left the running set before this process had heard of them, found by name.

In mid-rollout a stream may be with a replica of the old version, which drains and so is in no
update of Serve's, while its client comes back to an ingress of the new one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.serve._private.common import ReplicaID, RunningReplicaInfo
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve._private.request_router.replica_wrapper import RunningReplica

from deployments.replica_board import ReplicaGone

LOOK_UP_TIMEOUT_S = 1.0
_CONFIG, _GRPC_PORT = 0, 3
"""Places in the tuple that Serve's replicas tell of themselves."""


async def find_departed(replica_id: ReplicaID) -> RunningReplica:
    """The replica of that name, if it still lives.

    Raises:
        ReplicaGone: it does not, or does not answer.
    """
    try:
        async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
            # Both ask Ray's control store and block.
            actor = await asyncio.to_thread(_actor_of, replica_id)
            address = await asyncio.to_thread(_address_of, actor)
            # Serve's controller calls it for the same reason after its own restart; what is
            # initialised already stays as it is.
            told = await actor.initialize_and_get_metadata.remote()
            info = RunningReplicaInfo(
                replica_id=replica_id,
                node_id=address["NodeID"],
                node_ip=address["IPAddress"],
                availability_zone=None,
                actor_name=replica_id.to_full_id_str(),
                max_ongoing_requests=told[_CONFIG].max_ongoing_requests,
                port=told[_GRPC_PORT],
            )
            replica = await asyncio.to_thread(RunningReplica, info)
    except Exception as error:
        name = f"{replica_id.deployment_id.name} replica {replica_id.unique_id}"
        raise ReplicaGone(f"{name} is not to be found: {error!r}"[:300]) from error
    return replica


def _actor_of(replica_id: ReplicaID) -> Any:
    return ray.get_actor(replica_id.to_full_id_str(), namespace=SERVE_NAMESPACE)


def _address_of(actor: Any) -> dict[str, Any]:
    address: dict[str, Any] = ray._private.state.actors(actor._actor_id.hex())["Address"]
    return address
