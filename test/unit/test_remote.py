"""A server by its URL: what is asked with which key, and what each way to go wrong is called."""

import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import psutil
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sglang_reshard.api.remote_engine import ADMIN_API_KEY, API_KEY, URL, RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import EngineRefused, EngineUnreachable, Mismatch, TornWeights, Unauthorized, Unsupported
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.weights_info import LayoutInfo, WeightsInfo
from sglang_reshard.version import PROTOCOL, __version__
from support.left_behind import connections

REQUEST = DistributedUpdateWeightsReq(
    address=Address("s", "127.0.0.1", 1, "ab"), update=1, layout="l", handles=("h",), trainer_hosts=("t",)
)
INFO = WeightsInfo(
    version="7", package_version=__version__, protocol=PROTOCOL, layout=LayoutInfo("ab12", 4, 310, 1_192_000_000)
)


class Answering:
    """An HTTP server that says to every request what it was told to, and keeps what was asked."""

    def __init__(self):
        self.status, self.body, self.asked = 200, b"null", []
        answering = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(content) if content else None
                answering.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
                self.send_response(answering.status)
                self.send_header("Content-Length", str(len(answering.body)))
                self.end_headers()
                self.wfile.write(answering.body)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def says(self, body, status=200):
        self.status, self.body = status, body if isinstance(body, bytes) else msgspec.json.encode(body)

    def end(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def certificate(tmp_path):
    """Of an authority that nobody knows: a key and a certificate in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path / "server.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def server():
    answering = Answering()
    yield answering
    answering.end()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in (URL, API_KEY, ADMIN_API_KEY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # an engine is never behind it


@pytest.mark.parametrize(
    ("keys", "generating", "controlling"),
    [
        ({}, None, None),
        ({"api_key": "a"}, "Bearer a", "Bearer a"),
        ({"admin_api_key": "b"}, "Bearer b", "Bearer b"),
        ({"api_key": "a", "admin_api_key": "b"}, "Bearer a", "Bearer b"),
    ],
)
def test_each_call_has_the_key_that_the_server_asks_for(server, keys, generating, controlling):
    engine = RemoteEngine(server.url + "/", **keys)
    engine.generate("Say yes", sampling_params={"temperature": 0}, return_logprob=False, lora_path=None)
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation()
    engine.pause_generation("retract")
    engine.continue_generation()
    engine.flush_cache()
    engine.record_probe(ProbeSummary("passed", 0.5, None, 2.0))
    body = {"text": "Say yes", "sampling_params": {"temperature": 0}, "return_logprob": False}
    assert server.asked == [
        ("POST", "/generate", generating, body),
        ("POST", "/release_memory_occupation", controlling, {"tags": ["weights"]}),
        ("POST", "/resume_memory_occupation", controlling, {"tags": None}),
        ("POST", "/pause_generation", controlling, {"mode": "retract"}),
        ("POST", "/continue_generation", controlling, {}),
        ("POST", "/flush_cache", controlling, None),
        (
            "POST",
            "/record_probe",
            controlling,
            {"outcome": "passed", "mean_difference": 0.5, "largest_difference": None, "seconds": 2.0},
        ),
    ]


def test_url_and_keys_may_be_in_the_environment(server, monkeypatch):
    monkeypatch.setenv(URL, server.url)
    monkeypatch.setenv(API_KEY, "a")
    monkeypatch.setenv(ADMIN_API_KEY, "b")
    server.says(INFO)
    assert RemoteEngine().check() == INFO
    assert RemoteEngine(admin_api_key="c").check() == INFO
    RemoteEngine().generate("x")
    assert [key for _, _, key, _ in server.asked] == ["Bearer b", "Bearer c", "Bearer a"]


def test_tensors_go_as_lists_and_what_cannot_go_over_http_is_refused_before_it_goes(server):
    RemoteEngine(server.url).generate(input_ids=torch.tensor([1, 2]))
    with pytest.raises(Unsupported, match="/generate: an argument cannot be sent over HTTP: object"):
        RemoteEngine(server.url).generate("x", image_data=object())
    assert [body for *_, body in server.asked] == [{"input_ids": [1, 2]}]


def test_a_server_with_a_certificate_is_trusted_as_the_environment_says(server, certificate, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.server.socket = context.wrap_socket(server.server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    with pytest.raises(EngineRefused, match="CERTIFICATE_VERIFY_FAILED"):
        RemoteEngine(url).flush_cache()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    RemoteEngine(url).flush_cache()
    assert [path for _, path, _, _ in server.asked] == ["/flush_cache"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        *((url, "pass http://host:port") for url in ("127.0.0.1:30000", "http://", "ftp://host", "http://host:port")),
        ("http://host?token=a", "is not the URL of a server"),
        ("http://host/#b", "is not the URL of a server"),
        (None, f"or set {URL}"),
    ],
)
def test_what_is_no_url_of_a_server_is_told_so(url, says):
    with pytest.raises(Unsupported, match=says):
        RemoteEngine(url)


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (401, {"error": "Unauthorized"}, Unauthorized, "--api-key as api_key"),
        (403, {"error": "Forbidden"}, Unauthorized, "--admin-api-key as admin_api_key"),
        (404, {"detail": "Not Found"}, Unsupported, f"Install {__version__} and restart the server"),
        (
            200,
            {"version": "7", "package_version": "0.0.1"},
            Mismatch,
            r"^http\S+ has protocol 0 \(sglang-reshard 0.0.1",
        ),
        (200, msgspec.structs.replace(INFO, protocol=PROTOCOL + 1), Mismatch, f"has protocol {PROTOCOL + 1} "),
        (200, {"hello": "world"}, Mismatch, "Is this the URL of an SGLang server"),
        (200, b"<html>", Mismatch, "Is this the URL of an SGLang server"),
        (500, b"out of order", EngineRefused, "answered 500: 'out of order'"),
    ],
)
def test_a_server_that_cannot_be_updated_is_known_at_once(server, status, body, kind, says):
    server.says(body, status)
    with pytest.raises(kind, match=says):
        RemoteEngine(server.url).check()


def test_a_server_that_is_down_is_told_so(server):
    server.end()
    with pytest.raises(EngineRefused, match=f"{server.url} did not answer: ConnectError.* Is the server up"):
        RemoteEngine(server.url).check()


def test_a_server_that_hangs_is_told_so(server):
    server.server.shutdown()  # it accepts still, and nobody answers
    with pytest.raises(EngineRefused, match="ReadTimeout"):
        RemoteEngine(server.url, timeout_s=0.05).check()


@pytest.mark.parametrize("status", [502, 503, 504])
def test_what_a_proxy_answers_is_no_refusal_of_the_server(server, status):
    server.says(b"<html>upstream timed out</html>", status)
    with pytest.raises(EngineUnreachable, match=f"answered {status}"):
        RemoteEngine(server.url).load_snapshot("/run/step-1", "step-1", 1)
    server.says({"error": {"message": "busy"}}, status)
    with pytest.raises(EngineRefused, match="busy") as raised:
        RemoteEngine(server.url).load_snapshot("/run/step-1", "step-1", 1)
    assert type(raised.value) is EngineRefused


@pytest.mark.parametrize(
    ("status", "error", "kind", "says"),
    [
        (503, {"message": "half of update 7", "type": "TornWeights", "code": 503}, TornWeights, "^half of update 7$"),
        (400, {"message": "The input is too long"}, EngineRefused, "/generate answered 400: The input is too long"),
    ],
)
def test_what_the_server_refuses_is_repeated(server, status, error, kind, says):
    server.says({"error": error}, status)
    with pytest.raises(kind, match=says):
        RemoteEngine(server.url).generate("x")


def test_an_update_that_failed_is_an_answer(server):
    output = DistributedUpdateWeightsOutput(success=False, message="no", torn=True)
    server.says(output, 400)
    assert RemoteEngine(server.url, api_key="k").update_weights_distributed(REQUEST) == output
    method, path, key, body = server.asked[0]
    assert (method, path, key, body["update"]) == ("POST", "/update_weights_distributed", "Bearer k", 1)


def test_the_way_to_a_server_names_our_address():
    assert RemoteEngine("http://127.0.0.1:1").local_address() == "127.0.0.1"
    assert RemoteEngine("http://localhost").local_address() in ("127.0.0.1", "::1")
    with pytest.raises(EngineRefused, match="Is the host name right"):
        RemoteEngine("http://no-such-host.invalid:1").local_address()


def test_many_calls_leave_no_connection_open(server):
    """One that idles is closed by the server some day, and a request on it at that moment is lost."""
    engine = RemoteEngine(server.url)
    for _ in range(20):
        engine.flush_cache()
    assert len(server.asked) == 20
    port = server.server.server_port
    ours = [c for c in connections("tcp") if c.raddr and c.raddr.port == port]
    assert [c for c in ours if c.status == psutil.CONN_ESTABLISHED] == []
