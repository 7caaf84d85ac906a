"""Opening stores: the meaning of URLs, the environment, and secrets, which are sent to no other host."""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path

import pytest
from fault_server import BODY, FaultServer
from folders import GOLDEN
from object_server import read_ranges

from wdskit.errors import StorageError
from wdskit.storage import requests
from wdskit.storage.buckets import upload
from wdskit.storage.objects import ObjectFile, ObjectStream
from wdskit.storage.stores import is_metadata_failure, locate
from wdskit.storage.urls import open_stream

PEM = GOLDEN / "loopback_leaf.pem"
"""A certificate for 127.0.0.1 with its key, signed by `CA`."""
CA = GOLDEN / "loopback_ca.pem"
"""A certificate authority that nothing else trusts; its key is not stored."""
SECRET = "hush" * 3


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Set a home folder without credentials."""
    for name in [name for name in os.environ if name.startswith(("HF_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    requests.loop_of_this_process("").stores.clear()
    return tmp_path


def aws(home, credentials="", config=""):
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws" / "credentials").write_text(credentials)
    (home / ".aws" / "config").write_text(config)


def problem(url: str) -> str:
    with pytest.raises(StorageError) as caught:
        ObjectFile(url).read_at(0, 3)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in caught.value.url
    return str(caught.value)


def authorization(server) -> str:
    headers = {name.lower(): value for name, value in server.requests[-1][1].items()}
    return headers.get("authorization", "")


# URLs.


@pytest.mark.parametrize(
    ("url", "root", "key"),
    [
        ("s3://bucket/a/b%20c%23.tar", "bucket", "a/b c#.tar"),
        ("S3://My-Bucket.x/a b.tar", "My-Bucket.x", "a b.tar"),
        ("gs://bucket/a", "bucket", "a"),
        ("hf://datasets/o/n/d/a.tar", "https://huggingface.co/datasets/o/n/resolve/main", "d/a.tar"),
        ("hf://datasets/o/n@v1/a.tar", "https://huggingface.co/datasets/o/n/resolve/v1", "a.tar"),
        ("hf://datasets/o/n@refs%2Fpr%2F1/a", "https://huggingface.co/datasets/o/n/resolve/refs%2Fpr%2F1", "a"),
        ("https://h:9/d/a%20b.tar?x=1", "https://h:9/?x=1", "d/a b.tar"),
        ("http://h/d%2Fa.tar", "http://h/d%2Fa.tar", ""),
    ],
)
def test_where_an_object_lives(url, root, key):
    location = locate(url)
    assert (location.root, location.key, location.url) == (root, key, url.partition("?")[0])
    assert "?" not in repr(location)


@pytest.mark.parametrize(
    "url",
    [
        "s3://", "s3:///a",  "s3://bucket/",  "s3://bucket/a?b",
         "hf://o/n/a",  "gs://",  "http://",
        "abfs://c/a", "file:///a",
    ],
)  # fmt: skip
def test_urls_that_name_no_object(url):
    with pytest.raises(StorageError) as caught:
        ObjectFile(url)
    assert caught.value.url == url.partition("?")[0]


def test_passwords_in_urls_are_refused_and_not_shown():
    for scheme in ("s3", "http", "https"):
        assert "a user or password" in problem(f"{scheme}://me:{SECRET}@bucket/a.tar")
        assert "a user or password" in problem(f"{scheme}://me:{SECRET}@bucket/a.tar?sig={SECRET}")


# http(s).


def test_paths_and_queries_arrive_as_they_are(faults):
    for path in (
        "/d/ok.tar",
        "/a%20%23%3F%25/ok.tar?sig=a%2Fb%3D&x=1",
        "/d%2Fe/ok.tar",
        "/d//ok.tar?y",
        "/%C3%A9/ok.tar",
    ):
        assert ObjectFile(faults.url + path).read_at(0, 9) == BODY[:9]
        assert faults.requests[-1][0] == path


def test_tls_is_checked_and_an_own_ca_can_be_named(monkeypatch):
    with FaultServer(PEM) as server:
        assert "its TLS certificate is not trusted" in problem(f"{server.url}/ok.tar")
        assert "tries" not in problem(f"{server.url}/ok.tar")
        requests.loop_of_this_process("").stores.clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(CA))
        assert ObjectFile(f"{server.url}/ok.tar").read_at(0, 9) == BODY[:9]
        monkeypatch.delenv("SSL_CERT_FILE")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(CA))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        assert ObjectFile("s3://bucket/ok.tar").read_at(0, 9) == BODY[:9]
        monkeypatch.setenv("SSL_CERT_FILE", "/none.pem")
        assert "/none.pem" in problem(f"{server.url}/d/ok.tar?x")


@pytest.mark.parametrize("fault", ["ok", "denied", "missing", "reset", "busy_3"])
def test_a_redirect_tells_the_other_host_no_query(faults, monkeypatch, fault):
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    url = f"{faults.url}/moved.tar?sig={SECRET}"
    with FaultServer() as other:
        faults.location = other.url.replace("127.0.0.1", "localhost") + f"/{fault}.tar?part=1"
        if fault in ("ok", "busy_3"):
            assert ObjectFile(url).read_at(0, 9) == BODY[:9]
            with contextlib.closing(ObjectStream(url.replace("moved", "d//moved"))) as stream:
                assert BODY.startswith(stream.read(9))
        else:
            assert problem(url).startswith(f"{faults.url}/moved.tar: ")
        assert {path for path, _ in other.requests} == {f"/{fault}.tar?part=1"}
        assert SECRET not in str(other.requests)
    assert {path.partition("?")[2] for path, _ in faults.requests} == {f"sig={SECRET}"}


# S3.


def test_s3_takes_the_environment_first(faults, home, monkeypatch):
    aws(home, f"[default]\naws_access_key_id = FILE\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert ObjectFile("s3://bucket/d/ok.tar").read_at(0, 9) == BODY[:9]
    assert faults.requests[-1][0] == "/bucket/d/ok.tar"
    assert "Credential=ENVIRONMENT/" in authorization(faults)
    assert "/eu-west-3/s3/" in authorization(faults)
    assert "AccessDenied" in problem("s3://bucket/denied.tar")


def test_s3_takes_a_profile(faults, home, monkeypatch):
    aws(
        home,
        f"[default]\naws_access_key_id = A\naws_secret_access_key = {SECRET}\n"
        f"[other]\naws_access_key_id = B\naws_secret_access_key = {SECRET}\naws_session_token = token\n",
        f"[default]\nregion = eu-north-1\nendpoint_url = {faults.url}\n"
        f"[profile other]\nregion = sa-east-1\nendpoint_url = {faults.url}\ns3 =\n  max_concurrent_requests = 9\n"
        "[profile sso]\nsso_session = x\n[profile role]\nrole_arn = y\nsource_profile = other\n",
    )
    ObjectFile("s3://bucket/ok.tar").read_at(0, 9)
    assert "Credential=A/" in authorization(faults)
    assert "/eu-north-1/s3/" in authorization(faults)
    monkeypatch.setenv("AWS_PROFILE", "other")
    ObjectFile("s3://other/ok.tar").read_at(0, 9)
    assert "Credential=B/" in authorization(faults)
    assert "/sa-east-1/s3/" in authorization(faults)
    for name, what in (("sso", "`sso_session`"), ("role", "`role_arn`"), ("none", "there is no AWS profile 'none'")):
        monkeypatch.setenv("AWS_PROFILE", name)
        assert what in problem(f"s3://{name}-bucket/ok.tar")
    monkeypatch.delenv("AWS_PROFILE")
    aws(home, f"nonsense {SECRET}\n")
    assert "is not a valid file of AWS profiles" in problem("s3://third/ok.tar")


@pytest.mark.parametrize("asked_for", [True, False])
def test_s3_is_anonymous_where_it_is_asked_for_or_nothing_is_known(faults, home, monkeypatch, asked_for):
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    if asked_for:
        aws(home, f"[default]\naws_access_key_id = A\naws_secret_access_key = {SECRET}\n")
        monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "true")
    ObjectFile("s3://bucket/ok.tar").read_at(0, 9)
    assert authorization(faults) == ""


def test_a_machine_without_credentials_reads_public_buckets(faults, monkeypatch):
    """This includes a machine whose metadata address refuses credentials."""
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"{faults.url}/denied.x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    assert ObjectFile("s3://bucket/ok.tar").read_at(0, 9) == BODY[:9]
    assert "No credentials were found, and it is not public" in problem("s3://bucket/denied.tar")
    assert is_metadata_failure("GET http://169.254.169.254/computeMetadata/v1/instance/x")


def test_expired_tokens_are_read_again_once(faults, home, monkeypatch):
    old = f"[default]\naws_access_key_id = OLD\naws_secret_access_key = {SECRET}\naws_session_token = {SECRET}\n"
    aws(home, old)
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    faults.rejects, faults.on_reject = "Credential=OLD/", lambda: aws(home, old.replace("OLD", "NEW"))
    file = ObjectFile("s3://bucket/expired.tar")
    assert read_ranges(file, [(0, 9), (1_000_000, 1_000_009)]) == [BODY[:9], BODY[1_000_000:1_000_009]]
    assert "Credential=NEW/" in authorization(faults)
    faults.rejects = "Credential="
    num = len(faults.requests)
    assert "400 Bad Request (ExpiredToken)" in problem("s3://bucket/expired.tar")
    assert len(faults.requests) == num + 2


# Other stores.


def test_gs_speaks_to_an_emulator(faults, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", faults.url.removeprefix("http://"))
    assert ObjectFile("gs://bucket/d/ok.tar").read_at(0, 9) == BODY[:9]
    assert authorization(faults) == ""
    assert "AccessDenied" in problem("gs://bucket/denied")
    with pytest.raises(StorageError, match="the server answered 501"):  # the answer of the emulator, not of a cloud
        upload("gs://bucket/d/new.tar", Path(__file__))
    assert authorization(faults) == ""


def test_az_takes_a_connection_string_or_an_account(faults, monkeypatch):
    assert "AZURE_STORAGE_ACCOUNT_NAME is not set" in problem("az://box/d/ok.tar")
    key = "aHVzaGh1c2g="
    text = f"DefaultEndpointsProtocol=http;AccountName=acc;AccountKey={key};BlobEndpoint={faults.url}/acc;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert ObjectFile("az://box/d/ok.tar").read_at(0, 9) == BODY[:9]
    assert faults.requests[-1][0] == "/acc/box/d/ok.tar"
    assert authorization(faults).startswith("SharedKey acc:")
    assert key not in problem("az://box/denied.tar")
    text = f"BlobEndpoint={faults.url}/acc;AccountName=acc;SharedAccessSignature=sv=1&sig={SECRET}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert ObjectFile("az://tin/d/ok.tar").read_at(0, 9) == BODY[:9]
    assert SECRET in faults.requests[-1][0]
    problem("az://tin/denied.tar")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", faults.url)
    assert ObjectFile("az://can/d/ok.tar").read_at(0, 9) == BODY[:9]


@pytest.mark.parametrize("where", ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "home", "nowhere"])
def test_hf_sends_its_token_to_the_hub_only(faults, home, monkeypatch, where):
    monkeypatch.setenv("HF_ENDPOINT", faults.url)
    folder = home / (".cache/huggingface" if where == "home" else "hf")
    folder.mkdir(parents=True)
    if where == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", SECRET)
    elif where != "nowhere":
        (folder / "token").write_text(f"{SECRET}\n")
    if where in ("HF_TOKEN_PATH", "HF_HOME"):
        monkeypatch.setenv(where, str(folder / "token" if where == "HF_TOKEN_PATH" else folder))
    with FaultServer() as other:
        faults.location = other.url.replace("127.0.0.1", "localhost") + "/ok"
        assert ObjectFile("hf://datasets/o/n@v%2F1/moved.tar").read_at(0, 9) == BODY[:9]
        assert faults.requests[-1][0] == "/datasets/o/n/resolve/v%2F1/moved.tar"
        assert authorization(faults) == ("" if where == "nowhere" else f"Bearer {SECRET}")
        assert authorization(other) == ""
    assert "AccessDenied" in problem("hf://datasets/o/n/denied.tar")


def test_ais_follows_its_gateway_to_a_target(faults, monkeypatch):
    assert "AIS_ENDPOINT is not set" in problem("ais://bucket/d/moved.tar")
    monkeypatch.setenv("AIS_ENDPOINT", f"{faults.url}/")
    with FaultServer() as target:
        faults.location = f"{target.url}/ok"
        assert ObjectFile("ais://bucket/d/moved.tar").read_at(0, 9) == BODY[:9]
        assert faults.requests[-1][0] == "/ais/bucket/d/moved.tar"
        assert len(target.requests) == 1
    assert isinstance(open_stream("ais://bucket/ok"), ObjectStream)
