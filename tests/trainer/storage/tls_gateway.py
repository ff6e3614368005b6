"""Serves https://…googleapis.com on loopback for TensorFlow's own gs://, which does not support an emulator.

A client that goes through `https_proxy` asks it to CONNECT to Google; instead it speaks TLS itself, with a certificate
that the client trusts by `CURL_CA_BUNDLE`, and hands each request to the emulator.
"""

import datetime
import http.client
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOSTS = ("www.googleapis.com", "storage.googleapis.com")


@contextmanager
def tls_gateway(upstream: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment of a process whose TensorFlow reaches the emulator at gs://."""
    certificate = _self_signed(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    target = urlsplit(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_CONNECT(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.connection = context.wrap_socket(self.connection, server_side=True)
            self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
            self.close_connection = False
            try:
                while not self.close_connection:
                    self.handle_one_request()
            except OSError:  # the client hung up
                self.close_connection = True
            finally:
                for stream in (self.rfile, self.wfile, self.connection):
                    stream.close()

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
            try:
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield {
            "https_proxy": f"http://127.0.0.1:{server.server_port}",
            "CURL_CA_BUNDLE": str(certificate),
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCS_RETRY_CONFIG_MAX_RETRIES": "2",
            "NO_GCE_CHECK": "true",
        }
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _self_signed(folder: Path) -> Path:
    """Writes a key and a certificate that is valid for a day to one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests of this machine only")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "gateway.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return file
