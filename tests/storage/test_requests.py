"""Requests to stores: the number at once, and retries."""

from __future__ import annotations

import random

import pytest
from fault_server import BODY, FaultServer

from wdskit.errors import StorageError
from wdskit.storage import objects, requests
from wdskit.storage.objects import ObjectFile
from wdskit.storage.requests import LARGE_UNITS, MAX_IN_FLIGHT, classify_error, loop_of_this_process


@pytest.fixture(autouse=True)
def loop(monkeypatch):
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    event_loop = loop_of_this_process("")
    event_loop.limit = MAX_IN_FLIGHT
    yield event_loop
    event_loop.limit = MAX_IN_FLIGHT


def test_what_is_in_flight_is_bounded(monkeypatch, loop):
    monkeypatch.setattr(objects, "REQUEST_BYTES", 10_000)
    loop.limit = 5
    monkeypatch.setattr(requests, "MAX_IN_FLIGHT", 5)
    with FaultServer() as server:
        assert ObjectFile(f"{server.url}/slow.tar").read_at(0, 500_000) == BODY[:500_000]
        assert 2 <= server.most <= 5


def test_a_busy_server_gets_half_as_many_and_each_success_adds_one(loop, monkeypatch):
    monkeypatch.setattr(requests, "RETRY_S", 0.5)
    with FaultServer() as server:
        file = ObjectFile(f"{server.url}/busy_3.tar")
        file.read_at(0, 10)
        assert loop.limit == MAX_IN_FLIGHT // 8 + 1
        for number in range(MAX_IN_FLIGHT + 9):
            file.read_at(number, 10)
        assert loop.limit == MAX_IN_FLIGHT
        with pytest.raises(StorageError):
            ObjectFile(f"{server.url}/busy.tar").read_at(0, 10)
        assert loop.limit == LARGE_UNITS
        with pytest.raises(StorageError):
            ObjectFile(f"{server.url}/denied.tar").read_at(0, 10)
        assert loop.limit == LARGE_UNITS


def test_retries_draw_nothing_from_the_global_generator(loop):
    """Retries run in their own thread: otherwise a program that seeds `random` would draw other numbers."""
    loop.take_count()
    before = random.getstate()
    with FaultServer() as server:
        ObjectFile(f"{server.url}/busy_3.tar").read_at(0, 10)
    assert loop.take_count().retries == 3
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("text", "reason", "is_transient"),
    [
        ("status code: 503 Service Unavailable: hush", "the server answered 503 Service Unavailable", True),
        ("status code: 400 Bad Request: <Code>RequestTimeout</Code>", "400 Bad Request (RequestTimeout)", True),
        ("status code: 403 Forbidden: hush", "the server answered 403 Forbidden", False),
        ('HttpError { kind: Connect, code: 111,\n kind: ConnectionRefused,\n message: "Connection refused"', "", True),
        ("HttpError { kind: Timeout", "no reply came in time", True),
        ("HttpError { invalid peer certificate: UnknownIssuer hush", "its TLS certificate is not trusted", False),
        ("hush", "it cannot be read: ValueError", False),
    ],
)
def test_reasons_hold_nothing_of_a_reply(text, reason, is_transient):
    failure = classify_error(ValueError(text))
    assert reason in failure.reason
    assert failure.is_transient == is_transient
    assert "hush" not in failure.reason
