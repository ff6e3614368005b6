"""Emulates the Cloud Billing Catalog and BigQuery, with the SKUs of a published bill."""

import json

from tests.deploy.emulated_storage import Match
from tests.deploy.emulator import _ROUTES, Emulator, Query, Response, _page
from tests.fixtures import Json

VERTEX = "C7E2-9256-1C43"
COMPUTE = "6F81-5844-456A"
# https://zenn.dev/google_cloud_jp/articles/dws-flex-new-skus: an a3-highgpu-8g in us-central1, USD
# an hour.
BILL = {
    VERTEX: {
        "Vertex AI: Training/Pipelines on NVIDIA H100 80GB in Iowa": 11.2660332,
        "Vertex AI: Training/Pipelines on NVIDIA H100 80GB Mega in Iowa": 12.0,
        "Vertex AI: Training/Pipelines on A3 Instance Core in Iowa": 0.0293227,
        "Vertex AI: Training/Pipelines on A3 Instance Ram in Iowa": 0.0025534,
        "Vertex AI: Training/Pipelines management fee on NVIDIA H100 80GB in Iowa": 1.4694826,
        "Vertex AI: Training/Pipelines Management Fee on A3 Predefined Instance Core in Iowa": (
            0.0038247
        ),
        "Vertex AI: Training/Pipelines management fee on A3 Predefined Instance RAM in Iowa": (
            0.0003331
        ),
    },
    COMPUTE: {
        "DWS Defined Duration Nvidia H100 80GB GPU running in Americas": 4.200761,
        "DWS Defined Duration A3 Core running in Americas": 0.010934,
        "DWS Defined Duration A3 Ram running in Americas": 0.000952,
        "Commitment v1: A3 Core in Americas for 1 Year": 0.02,
        "SSD backed Local Storage": 0.08,
    },
}


def sku(description: str, usd: float, number: int, region: str = "us-central1") -> Json:
    """Returns a SKU as the catalog has it."""
    unit = "GiBy.mo" if "Local" in description else "h"
    price = {"currencyCode": "USD", "units": str(int(usd)), "nanos": round((usd - int(usd)) * 1e9)}
    rates = [{"startUsageAmount": 0, "unitPrice": price}]
    return {
        "skuId": f"{number:04}-AAAA",
        "description": description,
        "serviceRegions": [region],
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": rates}}],
    }


_JOB = {"jobReference": {"projectId": "p", "jobId": "j", "location": "EU"}}


def _query(google: Emulator, match: Match, query: Query, body: bytes) -> Response:
    google.queries.append(json.loads(body))
    return 200, {**_JOB, "jobComplete": False}


_ROUTES |= {
    r"GET /v1/services/([^/]+)/skus": lambda google, match, query, _: (
        200,
        _page("skus", google.skus[match[1]], 3, query),
    ),
    r"POST /bigquery/v2/projects/[^/]+/queries": _query,
    r"GET /bigquery/v2/projects/[^/]+/queries/j": lambda google, *_: (
        200,
        {
            **_JOB,
            "jobComplete": True,
            "rows": [{"f": [{"v": value} for value in row]} for row in google.billed],
        },
    ),
}
