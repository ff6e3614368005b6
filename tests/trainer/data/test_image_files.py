"""Tests that image files of any kind, also broken ones, are decoded or rejected with a reason."""

import csv
import io
import re
import warnings
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from tests.fixtures import parametrize
from tests.support import real_data
from trainer.base.settings.train_config import TrainConfig
from trainer.data.image_files import IMAGE_SUFFIXES, BadImage, decode
from trainer.data.sources import load_dataset


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def pixel(image: Image.Image, channels: int = 3, kind: str = "PNG", **options: Any) -> list[int]:
    array, _ = decode(encoded(image, kind, **options), 8, channels)
    assert array.shape == (8, 8, channels)
    return array[4, 4].tolist()


@parametrize("level", [0, 1, 255, 256, 32896, 65535])
def test_sixteen_bits_are_scaled_not_clipped(level: int) -> None:
    image = Image.fromarray(np.full((16, 16), level, np.uint16))
    assert pixel(image, channels=1) == [round(level / 257)]
    assert pixel(image, channels=3) == [round(level / 257)] * 3


def test_a_deep_tiff_is_scaled_by_its_range_or_refused() -> None:
    levels = np.array([0, 51, 65535], np.uint16).repeat(3).reshape(3, 3)
    array, converted = decode(encoded(Image.fromarray(levels), "TIFF"), 3, 1)
    assert array[:, 0, 0].tolist() == [0, 0, 255]
    assert converted == ["16 bits to 8"]
    for kind in (np.int32, np.float32):
        with pytest.raises(
            BadImage, match="have a sign, or 32 bits and an unknown range: convert it to 8 bits"
        ):
            decode(encoded(Image.fromarray(levels.astype(kind)), "TIFF"), 3, 1)


# One pixel of 16 bits per colour, with a transparent colour; Pillow does not write such files.
DEEP_COLOUR = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAIAAADA54+dAAAABnRSTlM8PEZHUFBjtQXEAAAAD0lEQVR4nGOwsXFzDwgAAAV4AaYQJZwsAAAAAElFTkSuQmCC"
)


def test_transparency_of_16_bits_is_refused() -> None:
    deep_grey = encoded(Image.fromarray(np.full((4, 4), 257, np.uint16)), transparency=257)
    for content in (DEEP_COLOUR, deep_grey):
        with pytest.raises(
            BadImage, match="16 bits and a transparent colour or level: convert it to 8 bits"
        ):
            decode(content, 8, 3)


def test_every_kind_of_name_that_pillow_gives_these_formats_is_read(tmp_path: Path) -> None:
    kinds = [".jfif", ".apng", *([".avif"] if "avif" in features.get_supported_modules() else [])]
    for suffix in kinds:
        assert suffix in IMAGE_SUFFIXES
        file = tmp_path / f"x{suffix}"
        Image.new("RGB", (16, 16), (200, 100, 50)).save(file)
        assert np.abs(decode(file, 8, 3)[0].astype(int) - (200, 100, 50)).max() < 6


PALETTE = Image.new("P", (16, 16), 1)
PALETTE.putpalette([0, 0, 0, 200, 100, 50])


@parametrize(
    "image, options, expected",
    [
        # transparency lies over white
        (Image.new("RGBA", (16, 16), (10, 20, 30, 0)), {}, [255, 255, 255]),
        (Image.new("LA", (16, 16), (100, 0)), {}, [255]),
        (PALETTE, {}, [200, 100, 50]),
        (PALETTE, {"transparency": 1}, [255, 255, 255]),
        (Image.new("1", (16, 16), 1), {}, [255]),
        (Image.new("RGB", (16, 16), (255, 0, 0)), {}, [76]),
        (Image.new("CMYK", (16, 16), (0, 255, 255, 0)), {"kind": "TIFF"}, [255, 0, 0]),
    ],
)
def test_modes_and_transparency_become_the_channels_asked_for(
    image: Any, options: Any, expected: list[int]
) -> None:
    assert pixel(image, len(expected), **options) == expected


@parametrize("orientation", [1, 6])
def test_orientation_is_applied(orientation: int) -> None:
    """Stores a picture, whose bright corner is at the top left when upright, as it is and
    turned."""
    upright = np.zeros((16, 16), np.uint8)
    upright[:6, :6] = 200
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.rot90(upright) if orientation == 6 else upright
    array, converted = decode(
        encoded(Image.fromarray(np.ascontiguousarray(stored)), exif=exif), 16, 1
    )
    assert array[1, 1, 0] > 150
    assert max(array[-2, -2, 0], array[1, -2, 0], array[-2, 1, 0]) < 50
    assert ("orientation" in converted) == (orientation != 1)


def test_the_middle_square_is_taken() -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    array, _ = decode(encoded(Image.fromarray(wide)), 10, 3)
    assert array.min() == 200


def test_a_bomb_is_refused() -> None:
    with (
        pytest.raises(BadImage, match=r"decompression bomb|exceeds limit"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        decode(encoded(Image.new("1", (20_000, 6_000))), 8, 1)


@pytest.mark.filterwarnings("ignore")  # as Encoded.decode does
def test_every_nasty_file_is_decoded_or_refused_as_its_manifest_says() -> None:
    root = real_data("nasty-images")
    rows = list(csv.DictReader((root / "MANIFEST.tsv").read_text().splitlines(), delimiter="\t"))
    assert len(rows) == 48
    for row in rows:
        for channels in (1, 3):
            try:
                found: Any = decode(root / row["file"], 32, channels)[0].shape
            except BadImage as error:
                found = str(error)
            # which has 16 bits
            if row["pillow_13.0.0_result"] == "ok" and "i_trns" not in row["file"]:
                assert found == (32, 32, channels), row["file"]
            else:
                assert isinstance(found, str), row["file"]
                assert re.fullmatch(".+", found), row["file"]


def test_a_folder_of_nasty_files_trains_without_the_bad_ones(tmp_path: Path) -> None:
    root = real_data("nasty-images") / "derived"
    config = TrainConfig(
        data=str(root), image_size=32, channels=3, global_batch_size=2, skip_bad_images=True
    )
    dataset = load_dataset(config)
    bad = [line.split(":")[0].rsplit("/")[-1] for line in dataset.notes["skipped"]]
    assert sorted(bad) == [
        "header_only.jpg",
        "html_error_page.jpg",
        "truncated_half.jpg",
        "zero_bytes.jpg",
        "zero_bytes.png",
    ]
    assert dataset.train.count == 14 - 1 - len(bad)  # .hidden.jpg is ignored
    assert dataset.notes["converted"]["16 bits to 8"] == 1
