"""Connect this process to a Ray cluster. Ray is imported only when it is used."""

from __future__ import annotations

import os
import socket
import threading
from types import ModuleType

from wdskit.errors import WdskitError
from wdskit.text import install_extra

_SETTINGS = 4
_HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_ANSWER_S = 10.0  # longest wait for the server of a cluster

_lock = threading.Lock()
_addresses: dict[str, str] = {}  # of the connections that `connect` made, by `_job_of`


def import_ray(error: type[WdskitError]) -> ModuleType:
    """Import Ray and return the module.

    Raises:
        WdskitError: Ray is not installed. The class of the error is `error`.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # a try to reach a cluster takes 40 s; Ray makes 20
    try:
        import ray
    except ImportError as err:
        raise error(f"on: Ray is not installed. {install_extra('ray')}") from err
    found: ModuleType = ray
    return found


def connect(on: str, error: type[WdskitError], *, starts_cluster: bool) -> tuple[ModuleType, bool]:
    """Connect this process to a Ray cluster, or use the connection that the process already has. The connection stays
    until the program ends or calls `ray.shutdown`.

    Args:
        on: "ray" or the address of a cluster, as `config.types.Cluster` describes. If the process is already connected,
            "ray" means this connection.
        error: Class of the errors to raise.
        starts_cluster: For a new connection. With "ray", the process connects to the cluster in RAY_ADDRESS, or to a
            running cluster that Ray finds. If Ray finds none, True starts a cluster on this machine, and False is an
            error. This process prints the output of the cluster's workers only if `starts_cluster` is False.

    Returns:
        The module, and whether the connection is new.

    Raises:
        WdskitError: Ray is not installed, the cluster cannot be reached, or `on` is an address and the process already
            has a connection that `connect` did not make to this address.
    """
    ray = import_ray(error)
    with _lock:
        if ray.is_initialized():
            if on not in {"ray", _addresses.get(_job_of(ray))}:
                msg = f"on: this process is already connected to Ray, but not to {on}."
                raise error(f"{msg} Pass on='ray' to use that connection.")
            return ray, False
        address = (os.environ.get("RAY_ADDRESS") or (None if starts_cluster else "auto")) if on == "ray" else on
        try:
            _check_server(address)
            ray.init(address=address, log_to_driver=not starts_cluster, logging_level="ERROR")
        except (ConnectionError, OSError, RuntimeError, ValueError) as err:
            msg = f"on: the cluster {on if address in {None, 'auto'} else address} cannot be reached: {last_line(err)}."
            raise error(msg if on != "ray" or starts_cluster else f"{msg}\n  {_DO_START}") from err
        _addresses[_job_of(ray)] = on
        return ray, True


_DO_START = (
    "Start one with `ray start --head`. If it runs on another machine, set RAY_ADDRESS to its address. "
    "If it asks for a token, set RAY_AUTH_MODE=token here, too."
)


def _job_of(ray: ModuleType) -> str:
    """Return the id of Ray's job, which differs for each connection of this process."""
    return str(ray.get_runtime_context().get_job_id())


def _check_server(address: str | None) -> None:
    """Raise OSError if no server of Ray answers at HOST:PORT. Without this check, Ray would try to connect for nine
    minutes. None and addresses without a port are not checked.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as server:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        server.sendall(_HTTP2_START)  # gRPC answers with its own SETTINGS frame (RFC 9113, 3.4)
        reply = server.recv(9, socket.MSG_WAITALL)
    if len(reply) < 9 or reply[3] != _SETTINGS:
        raise ConnectionError(f"a program that is not Ray answers at {host}:{port}")


def last_line(err: BaseException) -> str:
    """Return the last line of an error's message, without a full stop and without Ray's list of common causes. An error
    without a message gives the name of its class.
    """
    line = (str(err).strip() or type(err).__name__).splitlines()[-1]
    return line.partition(" Some common causes include")[0].strip().rstrip(".")
