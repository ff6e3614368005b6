"""Provides what `python -m deploy` does as functions, for notebooks, pipelines and programs (docs/api.md).

A function prints nothing unless it gets a stream, asks nothing and never ends the program. It raises UserError for what
the user must change, PlatformFault for what a service did, each with one line and an `exit_code`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.client.comparison_run import Comparison, compare
    from deploy.client.job_handle import RunResult, VertexJob, attach
    from deploy.client.job_list import jobs
    from deploy.client.plan_request import Plan, plan
    from deploy.client.prepared_job import submit
    from deploy.client.training_process import train
    from trainer.base.errors import PlatformFault, UserError

__all__ = [
    "Comparison", "Plan", "PlatformFault", "RunResult", "UserError", "VertexJob", "attach", "compare", "jobs", "plan",
    "submit", "train",
]  # fmt: skip
_MODULES = {
    "deploy.client.comparison_run": ("Comparison", "compare"), "deploy.client.job_list": ("jobs",),
    "deploy.client.job_handle": ("RunResult", "VertexJob", "attach"), "deploy.client.plan_request": ("Plan", "plan"),
    "deploy.client.prepared_job": ("submit",), "deploy.client.training_process": ("train",),
    "trainer.base.errors": ("PlatformFault", "UserError"),
}  # fmt: skip


def __dir__() -> list[str]:
    """Lists the public names, for completion in a notebook."""
    return [*__all__]


def __getattr__(name: str) -> Any:
    """Returns a public name, whose module is imported now, as a package that is only imported should cost nothing."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
