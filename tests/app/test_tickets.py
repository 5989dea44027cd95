from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from app.accounts import Holder, hash_key
from app.tickets import LIFE_S, SUBPROTOCOL, Claim, Tickets, offered_ticket
from protocol.errors import Overloaded, Unauthorized
from tests.app.fake_model import FakeIngress, FakeModel, gateway_on_air, gateway_over
from tests.app.stack import Site, on_air, running_stack
from tests.app.talker import talking
from tests.protocol.fakes import FakeClock

KEY = b"the key of every ingress"
KEYS = {name: f"key-{name}" for name in ("red", "blue")}
AUTH = {"keys": [{"tenant": name, "sha256": hash_key(key)} for name, key in KEYS.items()]}
JSON = "seedance.v1.json"


class House:
    """Ingresses that reach each other, each with a clock of its own."""

    def __init__(self, *names: str) -> None:
        self.away: set[str] = set()
        self.clocks = {name: FakeClock() for name in names}
        self.ingresses = {
            name: Tickets(KEY, name, ask=self.ask, clock=self.clocks[name]) for name in names
        }

    async def ask(self, claim: Claim) -> bool | None:
        await asyncio.sleep(0)
        present = (tickets for name, tickets in self.ingresses.items() if name not in self.away)
        answers = [tickets.spend(claim) for tickets in present]
        return next((answer for answer in answers if answer is not None), None)


async def is_good(tickets: Tickets, ticket: str) -> bool:
    try:
        await tickets.redeem(ticket)
    except Unauthorized as error:
        told = str(error)
    else:
        return True
    assert told == "this ticket is unknown, used or expired: get another"
    return False


@pytest.mark.parametrize("tenant", ["red", "", "red ", "équipe/1|2", "x" * 128])
async def test_a_ticket_is_good_once_and_for_its_tenant(tenant: str) -> None:
    tickets = Tickets(KEY, "a")
    ticket = tickets.issue(Holder(tenant, "digest"))
    assert await tickets.redeem(ticket) == Holder(tenant, "digest")
    assert not await is_good(tickets, ticket)
    assert await is_good(tickets, tickets.issue(Holder(tenant, "digest")))


async def test_a_ticket_is_good_for_half_a_minute_on_its_issuers_clock() -> None:
    house = House("a", "b")
    a, b = house.ingresses.values()
    late, timely = a.issue(Holder("red")), a.issue(Holder("red"))
    house.clocks["b"].now += 1000
    house.clocks["a"].now += LIFE_S - 0.1
    assert await is_good(b, timely)
    house.clocks["a"].now += 0.2
    assert not await is_good(a, late)
    assert not await is_good(b, late)
    assert not await is_good(b, timely)


async def test_a_ticket_is_good_once_however_many_ingresses_it_is_shown_to() -> None:
    house = House("a", "b", "c")
    for issuer in house.ingresses.values():
        ticket = issuer.issue(Holder("red"))
        shown_to = [*house.ingresses.values()] * 3
        goods = await asyncio.gather(*(is_good(tickets, ticket) for tickets in shown_to))
        assert sum(goods) == 1


async def test_a_ticket_whose_issuer_is_away_is_to_be_replaced_by_another() -> None:
    house = House("a", "b")
    ticket = house.ingresses["a"].issue(Holder("red"))
    house.away.add("a")
    with pytest.raises(Overloaded, match="get another"):
        await house.ingresses["b"].redeem(ticket)
    house.away.clear()
    assert await house.ingresses["b"].redeem(ticket) == Holder("red")


async def test_a_ticket_of_another_key_is_not_even_asked_about() -> None:
    async def ask(claim: Claim) -> bool | None:
        raise AssertionError

    tickets = Tickets(KEY, "b", ask=ask)
    assert not await is_good(tickets, Tickets(b"guess", "b").issue(Holder("red")))
    assert not await is_good(tickets, Tickets(None, "b").issue(Holder("red")))


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: _armour(raw)))
async def test_whatever_is_no_ticket_is_refused_in_the_same_words(text: str) -> None:
    assert not await is_good(Tickets(KEY, "a"), text)


@given(st.integers(0, 2**10), st.integers(1, 255))
async def test_a_ticket_that_was_altered_is_refused(at: int, flip: int) -> None:
    tickets = Tickets(KEY, "a")
    ticket = tickets.issue(Holder("red"))
    raw = bytearray(base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4)))
    raw[at % len(raw)] ^= flip
    assert not await is_good(tickets, _armour(bytes(raw)))
    assert not await is_good(tickets, ticket + "=")
    assert not await is_good(tickets, ticket * 100)
    assert await is_good(tickets, ticket)


def _armour(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def test_a_ticket_is_found_among_the_subprotocols_and_stands_alone() -> None:
    assert offered_ticket([]) is None
    assert offered_ticket([JSON, "chat"]) is None
    assert offered_ticket([JSON, f"{SUBPROTOCOL}abc"]) == "abc"
    with pytest.raises(Unauthorized, match="one ticket"):
        offered_ticket([f"{SUBPROTOCOL}abc", f"{SUBPROTOCOL}abc"])


async def ticket_of(site: Site, key: str | None = KEYS["red"]) -> str:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    reply = await site.http.post("/v1/tickets", headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["cache-control"] == "no-store"
    assert reply.json()["expires_in_s"] == LIFE_S
    ticket: str = reply.json()["ticket"]
    return ticket


async def refusal(url: str, *subprotocols: str, **headers: str) -> httpx.Response:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, subprotocols=[*subprotocols], additional_headers=headers):  # type: ignore[list-item]
            pass
    answer = caught.value.response
    return httpx.Response(answer.status_code, headers=[*answer.headers.raw_items()])


async def test_a_browser_connects_by_a_ticket_which_is_not_echoed() -> None:
    async with running_stack() as stack, on_air(stack.graph, auth=AUTH) as site:
        assert (await refusal(site.infer_url, JSON)).status_code == 401
        offered = (f"{SUBPROTOCOL}{await ticket_of(site)}", JSON)
        async with talking(site.infer_url, subprotocols=offered) as talker:
            assert talker.connection.subprotocol == JSON
            response = talker.connection.response
            assert response is not None
            assert offered[0] not in str(response.headers)
            assert await talker.answer("r1", "by ticket") == "by ticket"
        refused = await refusal(site.infer_url, *offered)
        assert refused.status_code == 401
        assert offered[0] not in str(refused.headers)


@pytest.mark.parametrize("key", [None, "key-green"])
async def test_a_ticket_is_issued_for_a_good_key_only(key: str | None) -> None:
    async with running_stack() as stack, on_air(stack.graph, auth=AUTH) as site:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        reply = await site.http.post("/v1/tickets", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "unauthorized"


async def test_an_open_server_has_tickets_too() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        offered = (JSON, f"{SUBPROTOCOL}{await ticket_of(site, None)}")
        async with talking(site.infer_url, subprotocols=offered) as talker:
            assert await talker.answer("r1") == "hi"


async def test_a_bad_ticket_is_refused_even_where_nobody_needs_one() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        refused = await refusal(site.infer_url, JSON, f"{SUBPROTOCOL}guess")
        assert refused.status_code == 401


async def test_a_ticket_without_a_subprotocol_beside_it_is_closed_with_4406() -> None:
    async with running_stack() as stack, on_air(stack.graph, auth=AUTH) as site:
        offered: Any = [f"{SUBPROTOCOL}{await ticket_of(site)}"]
        async with connect(site.infer_url, subprotocols=offered) as connection:
            await connection.wait_closed()
            assert connection.close_code == 4406


async def test_the_tenant_is_the_tickets_whatever_the_header_says() -> None:
    model, tickets = FakeModel(), Tickets(KEY, "a")
    gateway = gateway_over(FakeIngress(model), auth=AUTH, tickets=tickets)
    async with gateway_on_air(gateway) as url:
        for tenant, header in (("blue", None), ("red", "Basic cGFnZTpwYXNz"), ("blue", "Bearer x")):
            ticket = tickets.issue(Holder(tenant, hash_key(KEYS[tenant])))
            offered: Any = (JSON, f"{SUBPROTOCOL}{ticket}")
            headers = {} if header is None else {"Authorization": header}
            async with connect(url, subprotocols=offered, additional_headers=headers) as connection:
                await connection.recv()
                await connection.send('{"type": "INFER_REQ", "id": "r", "prompt": "hi"}')
                await connection.recv()
            assert [*model.runs.values()][-1].request.tenant == tenant


async def test_a_ticket_is_not_spent_on_a_server_that_is_full() -> None:
    tickets = Tickets(KEY, "a")
    gateway = gateway_over(FakeIngress(FakeModel()), auth=AUTH, tickets=tickets, max_connections=1)
    async with gateway_on_air(gateway) as url:
        ticket = tickets.issue(Holder("red", hash_key(KEYS["red"])))
        offered = (JSON, f"{SUBPROTOCOL}{ticket}")
        async with talking(url, key=KEYS["red"]):
            assert (await refusal(url, *offered)).status_code == 503
        async with talking(url, subprotocols=offered):
            pass


async def test_neither_ticket_nor_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    # Another test may have told it to be quiet.
    caplog.set_level(logging.DEBUG, logger="uvicorn.error")
    async with running_stack() as stack, on_air(stack.graph, auth=AUTH) as site:
        ticket = await ticket_of(site)
        async with talking(site.infer_url, subprotocols=(JSON, f"{SUBPROTOCOL}{ticket}")):
            pass
        await refusal(site.infer_url, JSON, f"{SUBPROTOCOL}{ticket}")
        async with talking(site.infer_url, key=KEYS["red"]):
            pass
    ours = [record for record in caplog.records if record.name != "websockets.client"]
    told = "\n".join(record.getMessage() for record in ours)
    assert "connection open" in told or "WebSocket" in told, "the server did log"
    assert ticket not in told
    assert KEYS["red"] not in told


async def test_the_document_has_the_tickets() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        document = (await site.http.get("/openapi.json")).json()
        operation = document["paths"]["/v1/tickets"]["post"]
        assert "30 s" in operation["description"]
        schema = document["components"]["schemas"]["TicketReply"]
        assert set(schema["properties"]) == {"ticket", "expires_in_s"}


async def test_the_client_is_served_for_the_page_and_nothing_beside_it() -> None:
    async with running_stack() as stack, on_air(stack.graph) as site:
        for name in ("seedance.js", "stream.js", "connection.js"):
            reply = await site.http.get(f"/static/{name}")
            assert reply.headers["content-type"].startswith("text/javascript")
            assert reply.headers["cache-control"] == "no-cache"
        for name in ("index.html", "package.json", "..%2Fpackage.json", "test/fakes.js"):
            assert (await site.http.get(f"/static/{name}")).status_code == 404
