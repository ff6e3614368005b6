"""Answers rows with an exported model, in calls of a fixed number of rows, so that an answer depends on its row alone.

The network is that of model.keras, called as `trainer.predict` calls it; if a class of it is not here, saved_model/.
The rows of a file get a file of answers, and one of errors, for each 10,000 lines. A part appears whole, its errors
before its answers, so the same command again goes on after the last part.
"""

import base64
import binascii
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.run_files.serving_file import Servable, read_servable
from trainer.base.storage import make_writable, output_address, write_whole
from trainer.base.storage.gcs import connect
from trainer.base.storage.local_files import Address, sha256_of
from trainer.data.decode import BadImage, decode
from trainer.data.images import UInt8Array, encode_png, noise, to_uint8
from trainer.measures.prediction import named_outputs, outputs_of
from trainer.run.export import load_template, model_inputs, named_leaves, random_rows
from trainer.user_code.interface import symbolic_inputs
from trainer.user_code.mistakes import OUT_OF_RANGE

Row = tuple[Any, ...]  # an array for each input
Call = Callable[..., Any]  # maps a tensor of a batch for each input to outputs
_IMAGES = 256  # of a generator, in one call


class BadRow(ValueError):
    """Reports a row that the model does not take; the text says why."""


class ServedModel:
    """Holds the model of a folder that `export` wrote. Raises UserError, calling it `name`, if it cannot be loaded."""

    def __init__(self, folder: Path, name: str, fixed_batch: int = 0) -> None:
        self.about = read_servable(folder, name)
        self._asked_batch = fixed_batch or self.about.fixed_batch
        network = None
        with suppress(UserError):  # a class may not be here
            network = load_template(folder / "model.keras", name)
        if network is not None and symbolic_inputs(network):
            self._call, self._specs = call_of(network, self.about)
        else:
            log.info(f"{name}: served from saved_model/, as model.keras needs a class that is not here")
            network = tf.saved_model.load(str(folder / "saved_model"))
            self._specs = {spec.name: spec for spec in network.serve.input_signature}
            self._call = tf.function(network.serve, autograph=False)
        self._network = network  # the weights live as long as it

    @cached_property
    def fixed_batch(self) -> int:
        """Returns the rows of each call."""
        return independent_batch(self._call, self._specs, self.about, self._asked_batch)

    def row(self, instance: Any) -> Row:
        """Returns the arrays of one row. Raises BadRow if the instance does not fit the model.

        An instance is the value of the one input, or an object with a value for each; an image may be {"b64": …}, PNG
        or JPEG; a generator takes {"seed": …}, and "label" if it has classes.
        """
        if self.about.latent_dim:
            return self._noise(instance)
        named = isinstance(instance, Mapping) and "b64" not in instance
        values = instance if named else {next(iter(self._specs)): instance}
        if len(self._specs) > 1 and not named:
            raise BadRow(f"it must be an object with {_listed(self._specs)}")
        if values.keys() != self._specs.keys():
            raise BadRow(f"it has {_listed(values)}, and the model's inputs are {_listed(self._specs)}")
        return tuple(self._array(name, values[name], spec) for name, spec in self._specs.items())

    def answers(self, rows: Sequence[Row]) -> list[Any]:
        """Returns each row's outputs, as JSON has them: by name, if there are several. At most `fixed_batch` rows."""
        filled = [*rows, *[rows[-1]] * (self.fixed_batch - len(rows))]
        outputs = self._call(*(tf.constant(np.stack(leaves)) for leaves in zip(*filled, strict=True)))
        if self.about.latent_dim:
            return [{"b64": base64.b64encode(encode_png(image)).decode()} for image in outputs.numpy()[: len(rows)]]
        columns = {name: _jsonable(array[: len(rows)]) for name, array in named_outputs(outputs, self._network)}
        if len(columns) == 1:
            return next(iter(columns.values()))
        return [{name: values[at] for name, values in columns.items()} for at in range(len(rows))]

    def answers_or_errors(self, rows: Sequence[Row]) -> list[Any]:
        """Returns each row's answer, or the BadRow of one that the model cannot compute, as a token that it lacks."""
        try:
            return self.answers(rows)
        except tf.errors.InvalidArgumentError as error:
            if len(rows) > 1:
                return [answer for row in rows for answer in self.answers_or_errors([row])]
            value = OUT_OF_RANGE.search(str(error))
            return [BadRow(f"the model cannot compute it: {value[0] if value else reason(error)}")]

    def images(self, *inputs: Any) -> UInt8Array:
        """Returns a generator's images, (count, height, width, channels), of noise (count, latent_dim) and labels."""
        firsts = range(0, len(inputs[0]), _IMAGES)
        return np.concatenate([self._call(*(part[at : at + _IMAGES] for part in inputs)).numpy() for at in firsts])

    def _array(self, name: str, value: Any, spec: Any) -> Any:
        shape, kind = self.about.image or spec.shape[1:], np.dtype(tf.as_dtype(spec.dtype).as_numpy_dtype)
        if isinstance(value, Mapping):
            return self._image(name, value)
        array = None
        with suppress(ValueError, OverflowError):  # rows of several lengths, numbers of any size
            array = np.asarray(value)
        if array is None or not tf.TensorShape(shape).is_compatible_with(array.shape):
            raise BadRow(f"{name}: it must have the shape {[size or 'any' for size in shape]}")
        if kind.kind == "O":
            if array.dtype.kind != "U":
                raise BadRow(f"{name}: it must be text")
            return np.vectorize(str.encode, otypes=[object])(array)
        with np.errstate(all="ignore"):
            cast = array.astype(np.uint8 if self.about.image else kind) if array.dtype.kind in "biuf" else array
        exact = cast.dtype.kind in "fb" or np.array_equal(cast, array)
        if array.dtype.kind not in "biuf" or not exact or not np.isfinite(cast.astype(np.float64)).all():
            numbers = "whole numbers from 0 to 255" if self.about.image else f"numbers of {kind.name}"
            raise BadRow(f"{name}: it must hold finite {numbers} only")
        return cast

    def _image(self, name: str, value: Mapping[str, Any]) -> Any:
        height, width, channels = self.about.image or (0, 0, 0)
        if not height or height != width or value.keys() != {"b64"}:
            raise BadRow(f"{name}: it must be an array of numbers")
        try:
            return decode(base64.b64decode(str(value["b64"]), validate=True), height, channels)[0]
        except (binascii.Error, ValueError, BadImage) as error:
            raise BadRow(f"{name}: the image cannot be decoded: {error}") from None

    def _noise(self, instance: Any) -> Row:
        names, classes = {"seed", "label"} if self.about.classes else {"seed"}, self.about.classes
        values = instance if isinstance(instance, Mapping) else {}
        seed, label = values.get("seed"), values.get("label", 0)
        if values.keys() != names or not (type(seed) is type(label) is int and 0 <= seed < 2**31):
            raise BadRow(f"it must be an object with whole numbers for {_listed(names)}")
        if not 0 <= label < max(classes, 1):
            raise BadRow(f"label={label}: the classes are 0 to {classes - 1}")
        drawn = noise(seed, 1, self.about.latent_dim, self.noise_type).numpy()[0]
        return (drawn, np.int32(label)) if classes else (drawn,)

    @property
    def noise_type(self) -> Any:
        """Returns the type of a generator's noise."""
        return next(iter(self._specs.values())).dtype


def call_of(network: keras.Model, about: Servable) -> tuple[Call, dict[str, Any]]:
    """Returns the function that predicts a batch as `trainer.predict` does, and the specs of its inputs by name."""
    structure = model_inputs(network)
    specs = dict(named_leaves(structure))

    def call(*leaves: Any) -> Any:
        pairs = zip(leaves, specs.values(), strict=True)
        cast = [leaf if leaf.dtype == tf.string else tf.cast(leaf, spec.dtype) for leaf, spec in pairs]
        outputs = outputs_of(network, (keras.tree.pack_sequence_as(structure, cast),))
        return to_uint8(outputs) if about.latent_dim else outputs

    return tf.function(call, autograph=False), specs


def independent_batch(call: Call, specs: Mapping[str, Any], about: Servable, rows: int) -> int:
    """Returns `rows`, or 1 if on this machine the bytes of a row's output depend on its place among them.

    A kernel may sum the rows at the end of a batch in another order; a layer may draw at random.
    """

    def outputs(shift: int) -> list[bytes]:
        moved = [tf.constant(np.roll(array, shift, axis=0)) for array in columns]
        return [np.roll(part.numpy(), -shift, axis=0).tobytes() for part in tf.nest.flatten(call(*moved))]

    columns = random_rows(specs, about, rows)
    expected = outputs(0)
    if all(outputs(shift) == expected for shift in range(1, rows)):
        return rows
    log.info("one row a call: on this machine the bytes of an answer depend on its place in a larger batch")
    return 1


def _jsonable(array: Any) -> list[Any]:
    """Returns the rows as lists; what is not finite, which JSON has no number for, as null."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        array = np.where(np.isfinite(array), array.astype(object), None)
    rows: list[Any] = array.tolist()
    return rows


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names)))[:200] or "nothing"


PART_ROWS = 10_000
_ANSWERS_OF = "answers_of.json"  # digests of the model's files and of the rows


def predict_rows(model: ServedModel, rows: Path, out: str) -> tuple[int, int]:
    """Writes OUT/predictions-00000.jsonl, … and OUT/errors-00000.jsonl, …; returns the counts of answers and errors.

    A line of answers is {"row": N, "prediction": …}, one of errors {"row": N, "error": "…"}; N counts lines from 0.
    """
    target = output_address(out, "out") or Path(out)
    if isinstance(target, Path):
        make_writable(target, "out")
    earlier, answered, failed, part = _names(target), 0, 0, -1
    _refuse_other_answers(target, earlier, {"model": dict(model.about.files), "rows": sha256_of(rows)}, out)
    log.info(f"{model.fixed_batch} rows a call")
    with rows.open("rb") as file:
        while lines := list(enumerate(itertools.islice(file, PART_ROWS), (part + 1) * PART_ROWS)):
            part += 1
            name = f"predictions-{part:05}.jsonl"
            if name in earlier:
                log.info(f"{name} is there")
                continue
            answers, errors = _answered(model, lines)
            if errors:
                _write(target, f"errors-{part:05}.jsonl", errors)
            _write(target, name, answers)
            answered, failed = answered + len(answers), failed + len(errors)
            log.info(f"{lines[-1][0] + 1:,} rows: {answered:,} answered, {failed:,} cannot be read")
    return answered, failed


def _answered(model: ServedModel, lines: Sequence[tuple[int, bytes]]) -> tuple[list[Any], list[Any]]:
    """Returns the lines of answers and of errors."""
    rows, answers, errors = [], [], []
    for number, line in lines:
        try:
            rows.append((number, model.row(json.loads(line))))
        except (BadRow, ValueError, RecursionError) as error:
            errors.append({"row": number, "error": str(error)})
    for at in range(0, len(rows), model.fixed_batch):
        numbers, batch = zip(*rows[at : at + model.fixed_batch], strict=True)
        for number, answer in zip(numbers, model.answers_or_errors(batch), strict=True):
            if isinstance(answer, BadRow):
                errors.append({"row": number, "error": str(answer)})
            else:
                answers.append({"row": number, "prediction": answer})
    return answers, sorted(errors, key=lambda error: error["row"])


def _refuse_other_answers(target: Path | Address, earlier: set[str], now: dict[str, Any], out: str) -> None:
    """Notes in the folder what its answers are of. Raises UserError if they are of another model or of other rows."""
    if _ANSWERS_OF not in earlier:
        _write(target, _ANSWERS_OF, [now])
        return
    try:
        before = json.loads(_read(target / _ANSWERS_OF))
        differing = [name for name in now if before[name] != now[name]]
    except (ValueError, KeyError, TypeError):
        differing = list(now)
    if differing:
        raise UserError(f"out={out}: its answers are of another {' and other '.join(differing)}: use another --out")


def _read(file: Path | Address) -> bytes:
    if isinstance(file, Path):
        return file.read_bytes()
    remote = connect().get(file)
    return connect().read(remote) if remote else b""


def _names(target: Path | Address) -> set[str]:
    if isinstance(target, Path):
        return {path.name for path in target.iterdir()}
    return {remote.address.name.rsplit("/", 1)[-1] for remote in connect().list(target)}


def _write(target: Path | Address, name: str, entries: Sequence[Any]) -> None:
    content = "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()
    if isinstance(target, Path):
        write_whole(target / name, content)
    else:
        connect().upload(content, target / name)
