"""Emulates the Cloud Billing Catalog and BigQuery on loopback, with the SKUs of a published bill, and with mischief."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

VERTEX, COMPUTE = "C7E2-9256-1C43", "6F81-5844-456A"
# https://zenn.dev/google_cloud_jp/articles/dws-flex-new-skus: an a3-highgpu-8g in us-central1, USD an hour.
BILL = {
    VERTEX: {
        "Vertex AI: Training/Pipelines on NVIDIA H100 80GB in Iowa": 11.2660332,
        "Vertex AI: Training/Pipelines on NVIDIA H100 80GB Mega in Iowa": 12.0,
        "Vertex AI: Training/Pipelines on A3 Instance Core in Iowa": 0.0293227,
        "Vertex AI: Training/Pipelines on A3 Instance Ram in Iowa": 0.0025534,
        "Vertex AI: Training/Pipelines management fee on NVIDIA H100 80GB in Iowa": 1.4694826,
        "Vertex AI: Training/Pipelines Management Fee on A3 Predefined Instance Core in Iowa": 0.0038247,
        "Vertex AI: Training/Pipelines management fee on A3 Predefined Instance RAM in Iowa": 0.0003331,
    },
    COMPUTE: {
        "DWS Defined Duration Nvidia H100 80GB GPU running in Americas": 4.200761,
        "DWS Defined Duration A3 Core running in Americas": 0.010934,
        "DWS Defined Duration A3 Ram running in Americas": 0.000952,
        "Commitment v1: A3 Core in Americas for 1 Year": 0.02,
        "SSD backed Local Storage": 0.08,
    },
}


def sku(description: str, usd: float, number: int, region: str = "us-central1") -> dict[str, Any]:
    """Returns a SKU as the catalog has it."""
    unit = "GiBy.mo" if "Local" in description else "h"
    price = {"currencyCode": "USD", "units": str(int(usd)), "nanos": round((usd - int(usd)) * 1e9)}
    rates = [{"startUsageAmount": 0, "unitPrice": price}]
    return {"skuId": f"{number:04}-AAAA", "description": description, "serviceRegions": [region],
            "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": rates}}]}  # fmt: skip


class Services:
    """Serves both; `skus` by service, `rows` of each query, `fault`: what the next requests meet."""

    def __init__(self) -> None:
        self.skus = {
            name: [sku(text, usd, number) for number, (text, usd) in enumerate(of.items())] for name, of in BILL.items()
        }
        self.rows: list[list[str]] = []
        self.queries: list[dict[str, Any]] = []
        self.faults: list[Callable[[dict[str, Any]], tuple[int, bytes]]] = []
        self.requests: list[str] = []
        handler = type("Handler", (_Handler,), {"services": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Services":
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def respond(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request: SKUs in pages of three, rows only at the second look."""
        if path.startswith("/v1/services/"):
            every, first = self.skus[path.split("/")[3]], int(query.get("pageToken", 0))
            more = {"nextPageToken": str(first + 3)} if len(every) > first + 3 else {}
            return {"skus": every[first : first + 3], **more}
        job = {"jobReference": {"projectId": "p", "jobId": "j", "location": "EU"}}
        if body:
            self.queries.append(body)
            return {**job, "jobComplete": False}
        return {**job, "jobComplete": True, "rows": [{"f": [{"v": value} for value in row]} for row in self.rows]}


class _Handler(BaseHTTPRequestHandler):
    services: Services

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def handle_any(self) -> None:
        services, address = self.services, urlsplit(self.path)
        services.requests.append(f"{self.command} {address.path}")
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        answer = services.respond(address.path, query, body)
        status, content = services.faults.pop(0)(answer) if services.faults else (200, json.dumps(answer).encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = handle_any


def failed(status: int) -> Callable[[dict[str, Any]], tuple[int, bytes]]:
    """Returns a fault: an error of Google's."""
    content = json.dumps({"error": {"code": status, "message": "it failed", "status": "X"}}).encode()
    return lambda answer: (status, content)


def half(answer: dict[str, Any]) -> tuple[int, bytes]:
    """Returns half of an answer."""
    content = json.dumps(answer).encode()
    return 200, content[: len(content) // 2]
