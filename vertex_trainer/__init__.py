"""Provides what `python -m deploy` does as functions, for notebooks, pipelines and programs
(docs/api.md).

Functions print nothing without a stream, ask nothing and never end the program; `fit` alone prints
and asks unasked. They raise UserError for what the user must change and PlatformFault for failures
of a service, each with one line and an `exit_code`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.api.compare import Comparison, compare
    from deploy.api.jobs import attach, jobs
    from deploy.api.plan import Plan, plan
    from deploy.api.submit import submit
    from deploy.job.vertex_job import RunResult, VertexJob
    from trainer.base.errors import PlatformFault, UserError
    from vertex_trainer.training import Fitted, fit, train

__all__ = [
    "Comparison",
    "Fitted",
    "Plan",
    "PlatformFault",
    "RunResult",
    "UserError",
    "VertexJob",
    "attach",
    "compare",
    "fit",
    "jobs",
    "plan",
    "submit",
    "train",
]
_MODULES = {
    "deploy.api.compare": ("Comparison", "compare"),
    "deploy.api.jobs": ("attach", "jobs"),
    "deploy.api.plan": ("Plan", "plan"),
    "deploy.api.submit": ("submit",),
    "vertex_trainer.training": ("Fitted", "fit", "train"),
    "deploy.job.vertex_job": ("RunResult", "VertexJob"),
    "trainer.base.errors": ("PlatformFault", "UserError"),
}


def __dir__() -> list[str]:
    """Lists the public names, for completion in a notebook."""
    return [*__all__]


def __getattr__(name: str) -> Any:
    """Returns a public name, whose module is imported only now to keep the start quick."""
    if name == "__version__":
        return importlib.import_module("trainer").__version__
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
