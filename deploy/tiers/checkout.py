"""Names the files that a checkout has beside trainer/ and deploy/; setup.py puts copies of them into each wheel."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIES = Path(__file__).parents[1] / "checkout"  # in an installed copy


def beside(name: str) -> Path:
    """Returns the file or folder `name` of the checkout, or of its copies in a wheel."""
    return (ROOT if (ROOT / "setup.py").is_file() else COPIES) / name
