"""Find and open the store of a URL.

URLs are percent-encoded: `%23` is a `#` in the object's key. Settings and secrets come from the environment and from
the files of the cloud's own tools, never from a URL. The exception is the query of an http(s) URL, which no message
shows.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from wdskit.errors import StorageError
from wdskit.storage.urls import scheme_of, shown_url

OBSTORE_ERRORS = (BaseError, OSError, ValueError)
"""Errors that obstore raises: its own errors, OSError, and ValueError for an invalid key."""
REQUEST_S = 365 * 86400.0
"""Longest time for one request with its body: a year, because a stream may be read slowly. The callers set limits."""
READ_S = 15.0
"""Longest wait for the next bytes."""
CONNECT_S = 5.0
"""Longest wait for a connection."""

_METADATA_PATHS = ("/latest/api/token", "/latest/meta-data/", "/computeMetadata/", "/metadata/identity/")
_HOST = re.compile(r"[^:/]+://[^/#]*")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SERVER = re.compile(r"https?://[\w.:\[\]-]+(?:[/?]\S*)?", re.ASCII | re.IGNORECASE)
_ASCII = bytes(range(33, 127))
_YES = ("1", "true", "yes")
_AWS_PROVIDERS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class Location:
    """The location of an object.

    Attributes:
        scheme: The scheme of the object's URL.
        root: For s3 and gs: the name of the bucket. For az: the name of the container. For other schemes: the URL
            without the key, but with the query. The query is sent with every request.
        key: The object's name in `root`, not percent-encoded; "" if `root` is the whole URL.
        url: The URL for messages, without the query, which may have a signature.
    """

    scheme: str
    root: str = field(repr=False)
    key: str
    url: str


def locate(url: str) -> Location:
    """Return the location of a URL's object. Nothing is opened.

    Raises:
        StorageError: The URL is invalid or has a user, password or fragment, or AIS_ENDPOINT is not set for an ais URL.
    """
    scheme = scheme_of(url)
    shown = shown_url(url)
    host = _HOST.match(url.partition("?")[0])
    if host and "@" in host[0]:
        msg = f"{shown}: a user or password in a URL is not supported. Put them where the store's own tools read them."
        raise StorageError(msg, url=shown)
    try:
        parts = urlsplit(url)
    except ValueError as err:
        raise StorageError(f"{shown}: this is not a URL: {err}.", url=shown) from err
    key = unquote(parts.path[1:])
    if scheme not in ("http", "https") and (parts.fragment or parts.query):
        raise StorageError(f"{shown}: `?` and `#` end the key. Write %3F and %23 in their place.", url=shown)
    if scheme in ("http", "https") and parts.netloc:
        return _locate_http(scheme, parts.netloc, parts.path, parts.query, shown)
    if scheme == "hf":
        return _locate_hugging_face(parts.netloc, parts.path, shown)
    if not _BUCKET.fullmatch(parts.netloc) or scheme == "file":
        raise StorageError(f"{shown}: the URL names no object. Write s3://BUCKET/KEY.", url=shown)
    if scheme == "ais":
        gateway = _required("AIS_ENDPOINT", shown, "the URL of the cluster's gateway").rstrip("/")
        return Location(scheme, f"{gateway}/ais/{parts.netloc}", key, shown)
    return Location(scheme, parts.netloc, key, shown)


def _locate_http(scheme: str, host: str, path: str, query: str, shown: str) -> Location:
    """Return the location of an http(s) URL. `shown` is the URL for messages.

    `path` and `query` are percent-encoded. In the result, `key` is the decoded path, and `root` is the rest of the URL.
    But if the path has `%2F` or `//`, which obstore would change, `root` is the whole URL, and `key` is "".
    """
    end = f"?{query}" if query else ""
    if "%2F" in path.upper() or "//" in path:
        return Location(scheme, quote(f"{scheme}://{host}{path}{end}", safe=_ASCII), "", shown)
    return Location(scheme, quote(f"{scheme}://{host}/{end}", safe=_ASCII), unquote(path[1:]), shown)


def _locate_hugging_face(kind: str, path: str, shown: str) -> Location:
    """Return the location of a file in a data set of the Hugging Face hub. `shown` is the URL for messages.

    `path` is `/OWNER/NAME[@REVISION]/path`; without REVISION, the branch `main` is used. Raises StorageError if `kind`
    is not `datasets`, or if `path` has no owner or no name.
    """
    owner, _, rest = path[1:].partition("/")
    name, _, key = rest.partition("/")
    name, _, revision = name.partition("@")
    if kind != "datasets" or not owner or not name:
        msg = f"{shown}: the URL names no data set. Write hf://datasets/OWNER/NAME[@REVISION]/path."
        raise StorageError(msg, url=shown)
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    revision = quote(unquote(revision or "main"), safe="")
    return Location("hf", f"{hub}/datasets/{owner}/{name}/resolve/{revision}", unquote(key), shown)


def open_store(location: Location, *, anonymous: bool = False) -> Any:
    """Open the obstore store of a location. The store does not repeat failed requests; `storage.requests` does.

    Args:
        location: The location of an object in the store.
        anonymous: True sends unsigned requests to s3, gs or az. False lets the environment decide.

    Raises:
        StorageError: A setting of the environment is missing or invalid.
    """
    opener = {"s3": _open_s3, "gs": _open_gs, "az": _open_az}.get(location.scheme)
    try:
        if opener is not None:
            return opener(location, anonymous=anonymous)
        headers = {"Accept-Encoding": "identity"}
        if location.scheme == "hf" and (token := _hub_token()):
            headers["Authorization"] = f"Bearer {token}"
        return HTTPStore(location.root, **_options(location.root, headers=headers))
    except OSError as err:  # a file of certificates or credentials
        raise StorageError(f"{location.url}: its store cannot be opened: {err}", url=location.url) from None
    except (BaseError, ValueError) as err:  # the text of these errors may have a setting
        msg = f"{location.url}: its store cannot be opened: {type(err).__name__}. Check the environment variables."
        raise StorageError(msg, url=location.url) from None


def is_metadata_failure(text: str) -> bool:
    """Return True if an error of obstore means that no credentials were found. `text` is the text of the error."""
    return any(path in text for path in _METADATA_PATHS)


def _options(url: str, *, ca_bundle: str = "", headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the keyword arguments that all stores share: timeouts, trusted certificates, headers, and no retries.

    Args:
        url: URL of the server; "" for the default server. http, also after a redirect, is allowed only if `url` is
            http.
        ca_bundle: File of trusted certificates. "" uses the file in SSL_CERT_FILE, if this variable is set.
        headers: Headers to send with every request.

    Raises ValueError if `url` is invalid, and OSError if the file of certificates cannot be read.
    """
    if url and not _SERVER.fullmatch(url):  # obstore would panic
        raise ValueError(url)
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=REQUEST_S),
        "read_timeout": timedelta(seconds=READ_S),
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "allow_http": url.lower().startswith("http:"),
        "default_headers": dict(headers or {}),
    }
    if path := ca_bundle or os.environ.get("SSL_CERT_FILE"):
        options["root_certificate"] = Path(path).read_bytes()
    return {"client_options": options, "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}}


def _open_s3(location: Location, *, anonymous: bool) -> Any:
    """Open an S3 bucket. Credentials come from the environment, else the profile, else the machine's own credentials.

    Raises StorageError if the profile is invalid, or has a kind of credentials that wdskit does not read. A setting
    that is invalid for another reason raises OSError, ValueError or obstore's BaseError.
    """
    env = os.environ
    profile = _aws_profile(location.url)
    settings: dict[str, Any] = {}
    if not env.get("AWS_ACCESS_KEY_ID") and "aws_access_key_id" in profile:
        names = ("access_key_id", "secret_access_key", "session_token")
        settings |= {name: profile[f"aws_{name}"] for name in names if f"aws_{name}" in profile}
    found = env.get("AWS_ACCESS_KEY_ID") or settings
    if not (found or any(env.get(name) for name in _AWS_PROVIDERS)):
        other = next((name for name in profile if name in ("role_arn", "credential_process") or "sso" in name), None)
        if other is not None and not (anonymous or _is_set("AWS_NO_SIGN_REQUEST")):
            msg = f"{location.url}: the AWS profile has `{other}`, which wdskit does not read."
            msg += ' Run `eval "$(aws configure export-credentials --format env)"` first.'
            raise StorageError(msg, url=location.url)
        anonymous = anonymous or _is_set("AWS_EC2_METADATA_DISABLED")
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region") or "us-east-1"
    named = (env.get("AWS_ENDPOINT_URL_S3"), env.get("AWS_ENDPOINT_URL"), profile.get("endpoint_url"))
    endpoint = next(filter(None, named), "")
    if endpoint:
        settings["endpoint"] = endpoint
    if anonymous or _is_set("AWS_NO_SIGN_REQUEST"):
        settings["skip_signature"] = True
    common = _options(endpoint, ca_bundle=env.get("AWS_CA_BUNDLE") or profile.get("ca_bundle", ""))
    return S3Store(location.root, region=region, **settings, **common)


def _aws_profile(url: str) -> dict[str, str]:
    """Return the settings of the AWS profile that the environment names, else of the profile `default`.

    Return {} if no profile is named and there is no `default`. Raises StorageError if the named profile does not exist
    or is empty, or if the config or credentials file is invalid. Messages name `url`.
    """
    chosen = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name = chosen or "default"
    values: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        path = os.path.expanduser(os.environ.get(variable) or default)  # noqa: PTH111 (a missing home is not an error)
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):  # the text of these errors has lines of the file
            raise StorageError(f"{url}: {path} is not a valid file of AWS profiles. Correct it.", url=url) from None
        if parser.has_section(section):
            values.update(parser[section])
    if chosen and not values:
        msg = f"{url}: there is no AWS profile {chosen!r}. Set AWS_PROFILE to one of ~/.aws/config, or unset it."
        raise StorageError(msg, url=url)
    return values


def _open_gs(location: Location, *, anonymous: bool) -> Any:
    """Open a bucket of Google Cloud Storage, or of its emulator if STORAGE_EMULATOR_HOST is set.

    An invalid setting raises OSError, ValueError or obstore's BaseError.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if host:
        host = host if "://" in host else f"http://{host}"
        empty = {"gcs_base_url": host.rstrip("/"), "disable_oauth": True, "client_email": "", "private_key": ""}
        return GCSStore(location.root, service_account_key=json.dumps(empty | {"private_key_id": ""}), **_options(host))
    settings: dict[str, Any] = {"skip_signature": True} if anonymous else {}
    return GCSStore(location.root, **settings, **_options(os.environ.get("GOOGLE_BASE_URL", "")))


def _open_az(location: Location, *, anonymous: bool) -> Any:
    """Open a container of Azure. The environment names the account, a connection string, or the emulator.

    Raises StorageError if no account is set. An invalid setting raises OSError, ValueError or obstore's BaseError.
    """
    env = os.environ
    text = env.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    if parts.get("UseDevelopmentStorage", "").lower() in _YES or _is_set("AZURE_STORAGE_USE_EMULATOR"):
        return AzureStore(location.root, use_emulator=True, **_options("http://127.0.0.1"))
    names = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    account = parts.get("AccountName") or next(filter(None, map(env.get, names)), "")
    if not account:
        account = _required(names[0], location.url, "the name of the storage account")
    endpoint = parts.get("BlobEndpoint") or env.get("AZURE_STORAGE_ENDPOINT") or env.get("AZURE_ENDPOINT") or ""
    if not endpoint and "EndpointSuffix" in parts:
        endpoint = f"{parts.get('DefaultEndpointsProtocol', 'https')}://{account}.blob.{parts['EndpointSuffix']}"
    settings: dict[str, Any] = {
        "account_name": account,
        "endpoint": endpoint.rstrip("/"),
        "account_key": parts.get("AccountKey") or env.get("AZURE_STORAGE_KEY"),
        "sas_key": parts.get("SharedAccessSignature"),
        "skip_signature": anonymous,
    }
    return AzureStore(location.root, **{k: v for k, v in settings.items() if v}, **_options(endpoint))


def _hub_token() -> str:
    """Return the token of the Hugging Face hub, from HF_TOKEN or the file of the hub's own tools; "" without token."""
    env = os.environ
    if env.get("HF_TOKEN"):
        return env["HF_TOKEN"].strip()
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    path = Path(os.path.expanduser(env.get("HF_TOKEN_PATH") or f"{home}/token"))  # noqa: PTH111 (a missing home is not an error)
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _required(name: str, url: str, what: str) -> str:
    """Return the environment variable `name`. If it is not set, raise a StorageError that says to set it to `what`."""
    value = os.environ.get(name)
    if not value:
        raise StorageError(f"{url}: {name} is not set. Set it to {what}.", url=url)
    return value


def _is_set(name: str) -> bool:
    """Return True if an environment variable is 1, true or yes, in any case."""
    return os.environ.get(name, "").lower() in _YES
