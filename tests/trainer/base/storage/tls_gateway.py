"""Serves https://…googleapis.com on loopback for TensorFlow's own gs://, which does not support an emulator.

A client that goes through `https_proxy` asks it to CONNECT to Google; instead it speaks TLS itself, with a certificate
that the client trusts by `CURL_CA_BUNDLE`, and hands each request to the emulator.
"""

import datetime
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.trainer.base.storage.fault_proxy import Forwarding, serving

HOSTS = ("www.googleapis.com", "storage.googleapis.com")


@contextmanager
def tls_gateway(upstream: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment of a process whose TensorFlow reaches the emulator at gs://."""
    certificate = _self_signed(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    class Handler(Forwarding):
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

    Handler.upstream = upstream
    with serving(Handler) as url:
        yield {
            "https_proxy": url, "CURL_CA_BUNDLE": str(certificate), "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCS_RETRY_CONFIG_MAX_RETRIES": "2", "NO_GCE_CHECK": "true",
        }  # fmt: skip


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
