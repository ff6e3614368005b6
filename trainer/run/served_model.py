"""Answers rows with an exported model, for the HTTP server and for files of rows.

A call takes any number of rows, padded to one of some 40 sizes.
The network is saved_model/, which has the predict_step that `trainer.predict` calls and needs no
class of the user's.
"""

import base64
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.run_files.serving_file import read_servable
from trainer.data.image_arrays import to_uint8
from trainer.data.image_files import BadImage, decode
from trainer.data.sample_grids import UInt8Array, encode_png, noise
from trainer.measures.prediction import named_outputs
from trainer.user_code.mistakes import OUT_OF_RANGE

Columns = tuple[Any, ...]  # an array for each input, with a row for each instance
_IMAGES = 256  # that a generator makes in one call
_MOST_ROWS = 1024  # in a call
_MOST_NUMBERS = 2**22  # in the largest input or output of a call, which bounds its memory
_MOST_SEED = 2**31 - 1


class BadRow(ValueError):
    """Reports a row that the model cannot answer; the text says why."""


class ServedModel:
    """Loads the model in a folder that `export` wrote.

    Raises UserError that names `name` if that fails.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.about = read_servable(folder, name)
        log.info(f"loads the model of {name} …")
        try:
            # The object is kept, as its weights live in it.
            self._network = tf.saved_model.load(str(folder / "saved_model"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{name}: TensorFlow cannot load its saved_model/: {reason(error)}"
            ) from error

        # Any number of rows is answered by one graph, which takes images as uint8.
        specs = {spec.name: spec for spec in self._network.serve.input_signature}

        def call(*leaves: Any) -> Any:
            pairs = zip(leaves, specs.values(), strict=True)
            outputs = self._network.serve(*(tf.cast(leaf, spec.dtype) for leaf, spec in pairs))
            makes_images = self.about.latent_dim and outputs.dtype != tf.uint8
            return to_uint8(outputs) if makes_images else outputs

        signature = []
        self._row_specs: dict[str, Any] = {}
        for key, spec in specs.items():
            dtype = tf.uint8 if self.about.image else spec.dtype
            signature.append(tf.TensorSpec(spec.shape, dtype))
            shape = tuple(self.about.image or tf.TensorShape(spec.shape)[1:])
            self._row_specs[key] = (shape, np.dtype(tf.as_dtype(spec.dtype).as_numpy_dtype))
        self._call = tf.function(call, autograph=False).get_concrete_function(*signature)
        self._specs = specs

    @cached_property
    def most_rows(self) -> int:
        """Returns the largest number of rows of a call."""
        shapes = [shape for _, shape in (*self.about.inputs.values(), *self.about.outputs.values())]
        # A size that varies is taken for 64.
        numbers = max(math.prod(size or 64 for size in shape) for shape in shapes)
        return max(8, min(_MOST_ROWS, _MOST_NUMBERS // max(numbers, 1)))

    def parse(
        self, instances: Sequence[Any]
    ) -> tuple[list[tuple[Sequence[int], Columns]], dict[int, BadRow]]:
        """Parses instances of JSON into blocks of equal shape, and errors by place.

        A block is (places, columns). An instance is the value of the one input, or an object with a
        value for each; an image may be {"b64": …}, a PNG or JPEG; a generator takes {"seed": …},
        and "label" if it has classes.
        """
        # Usually all have one shape and fit the model; otherwise each is parsed by itself.
        with suppress(BadRow):
            return [(range(len(instances)), self._columns(instances))], {}
        by_shape: dict[Any, list[tuple[int, Columns]]] = {}
        errors = {}
        for place, instance in enumerate(instances):
            try:
                row = self._columns([instance])
            except BadRow as error:
                errors[place] = error
            else:
                by_shape.setdefault(tuple(column.shape for column in row), []).append((place, row))
        blocks: list[tuple[Sequence[int], Columns]] = []
        for same_shape in by_shape.values():
            places, rows = zip(*same_shape, strict=True)
            blocks.append((places, tuple(map(np.concatenate, zip(*rows, strict=True)))))
        return blocks, errors

    def answer(self, columns: Columns) -> list[Any]:
        """Returns an answer for JSON to each of at most `most_rows` rows, or a BadRow.

        An answer is the one output, or an object of outputs by name if there are several. A
        classifier that knows the names of its classes adds "probabilities" and "label".
        """
        count = len(columns[0])
        try:
            arrays = self._outputs(columns)
        # A row is wrong, such as one with an unknown token, and is found by halving.
        except tf.errors.InvalidArgumentError as error:
            if half := count // 2:
                first = self.answer(tuple(part[:half] for part in columns))
                return first + self.answer(tuple(part[half:] for part in columns))
            value = OUT_OF_RANGE.search(str(error))
            return [BadRow(f"the model cannot compute it: {value[0] if value else reason(error)}")]
        if self.about.latent_dim:
            images = [base64.b64encode(encode_png(image)) for image in arrays["predictions"]]
            return [{"b64": image.decode()} for image in images]

        # The scores of a classifier become probabilities; rows with inf or nan get none.
        finite = np.ones(count, bool)
        for array in arrays.values():
            finite &= np.isfinite(array.reshape(count, -1)).all(axis=1)
        if self.about.scores:
            scores = np.where(finite[:, None], arrays["predictions"], 1).astype(np.float64)
            if self.about.scores == "logits":
                scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            arrays["probabilities"] = scores / scores.sum(axis=1, keepdims=True)
            arrays["label"] = np.take(self.about.class_names, scores.argmax(axis=1))

        # Several outputs become an object for each row.
        lists = {name: array.tolist() for name, array in arrays.items()}
        answers = next(iter(lists.values()))
        if len(lists) > 1:
            rows = zip(*lists.values(), strict=True)
            answers = [dict(zip(lists, row, strict=True)) for row in rows]
        for place in np.flatnonzero(~finite).tolist():
            answers[place] = BadRow(
                "the model answers with inf or nan: are the values of this row those of training?"
            )
        return answers

    def _outputs(self, columns: Columns) -> dict[str, Any]:
        """Returns the outputs as arrays by name.

        The call is padded by repeating the last row, and the result cut.
        """
        count = len(columns[0])
        latent_dim = self.about.latent_dim
        # Sizes are multiples of an eighth of the next power of two: few sizes, and at most a
        # quarter of padding.
        multiple = max(1, (1 << (count - 1).bit_length()) >> 3)
        padding = -count % multiple
        if latent_dim:
            rows = [noise(seed, 1, latent_dim, self.noise_type) for seed in columns[0].tolist()]
            columns = (np.concatenate(rows), *columns[1:])
        if padding:
            ends = [np.repeat(column[-1:], padding, 0) for column in columns]
            columns = tuple(map(np.concatenate, zip(columns, ends, strict=True)))
        outputs = self._call(*map(tf.constant, columns))
        if latent_dim:
            return {"predictions": outputs.numpy()[:count]}
        arrays = named_outputs(outputs, [*self.about.outputs])
        return {name: array[:count] for name, array in arrays}

    def images(self, *inputs: Any) -> UInt8Array:
        """Returns a generator's images (count, height, width, channels).

        inputs: noise, (count, latent_dim), and labels if it has classes.
        """
        images = []
        for begin in range(0, len(inputs[0]), _IMAGES):
            rows = [part[begin : begin + _IMAGES] for part in inputs]
            images.append(self._call(*rows).numpy())
        return np.concatenate(images)

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata of the V2 inference protocol: inputs, outputs, class names."""

        def tensor(name: str, dtype: str, shape: Sequence[int | None]) -> dict[str, Any]:
            kinds = {"string": "BYTES", "bfloat16": "BF16"}
            kind = kinds.get(dtype) or dtype.upper().replace("FLOAT", "FP")
            sizes = [-1, *(size or -1 for size in shape)]
            return {"name": name, "datatype": kind, "shape": sizes}

        return {
            "name": "model",
            "platform": "keras",
            "inputs": [tensor(name, *spec) for name, spec in self.about.requested.items()],
            "outputs": [tensor(name, *spec) for name, spec in self.about.answered.items()],
            "parameters": {"class_names": list(self.about.class_names)},
        }

    def _columns(self, instances: Sequence[Any]) -> Columns:
        """Returns the columns of instances of one shape.

        Raises BadRow if an instance does not fit the model.
        """
        # A generator takes the seeds of its noise, and labels if it has classes.
        if self.about.latent_dim:
            names = [*self.about.requested]
            classes = self.about.classes
            for instance in instances:
                values = instance if isinstance(instance, dict) else {}
                numeric = all(type(value) in (int, float) for value in values.values())
                whole = numeric and not any(value % 1 for value in values.values())
                if values.keys() != {*names} or not whole:
                    raise BadRow(f"it must be an object with whole numbers for {_listed(names)}")
                if not 0 <= values["seed"] <= _MOST_SEED:
                    raise BadRow(
                        f"seed={str(values['seed'])[:20]}: use a number from 0 to {_MOST_SEED}"
                    )
                if classes and not 0 <= values["label"] < classes:
                    raise BadRow(
                        f"label={str(values['label'])[:20]}: the classes are 0 to {classes - 1}"
                    )
            columns = [[instance[name] for instance in instances] for name in names]
            return tuple(np.array(column, np.int32) for column in columns)

        specs = self._specs
        # The one input of a model may stand by itself; several have an object with their names.
        objects = [row for row in instances if isinstance(row, dict) and "b64" not in row]
        if len(specs) == 1 and not objects:
            return (self._column(next(iter(specs)), instances),)
        for instance in instances:
            if not isinstance(instance, dict) or instance.keys() != specs.keys():
                has = f"it has {_listed(instance)}, and " if isinstance(instance, dict) else ""
                raise BadRow(f"{has}it must be an object with {_listed(specs)}")
        return tuple(self._column(name, [row[name] for row in instances]) for name in specs)

    def _column(self, name: str, values: Sequence[Any]) -> Any:
        """Returns the values of one input as an array.

        Raises BadRow if they do not fit its shape or type.
        """
        shape, dtype = self._row_specs[name]
        image = self.about.image

        # Images may be files in base64.
        if any(isinstance(value, dict) for value in values):
            height, width, channels = image or (0, 0, 0)
            coded = all(isinstance(value, dict) and value.keys() == {"b64"} for value in values)
            if not height or height != width or not coded:
                raise BadRow(f"{name}: it must be an array of numbers")
            try:
                pictures = [base64.b64decode(str(value["b64"]), validate=True) for value in values]
                return np.stack([decode(picture, height, channels)[0] for picture in pictures])
            except ValueError as error:
                raise BadRow(f"{name}: the image is not written in base64: {error}") from None
            except BadImage as error:
                raise BadRow(f"{name}: the image cannot be decoded: {error}") from None

        # All other values are arrays, whose shape and then type must fit.
        is_text = dtype.kind == "O"
        wrong_shape = f"{name}: it must have the shape {[size or 'any' for size in shape]}"
        try:
            array = np.array(values, object if is_text else None)
        # Numpy refuses rows of unequal lengths, and huge integers.
        except (ValueError, OverflowError):
            raise BadRow(wrong_shape) from None
        sizes = array.shape[1:]
        fitting = [size in (None, length) for size, length in zip(shape, sizes, strict=False)]
        if len(sizes) != len(shape) or not all(fitting):
            raise BadRow(f"{wrong_shape}, and has {[*sizes]}")
        if is_text:
            if not all(isinstance(text, str) for text in array.flat):
                raise BadRow(f"{name}: it must be text")
            return np.vectorize(str.encode, otypes=[object])(array)

        # Converting may round a fraction, but must not change a whole number or give infinity.
        if array.dtype.kind in "biuf":
            with np.errstate(all="ignore"):
                column = array.astype(np.uint8 if image else dtype)
            exact = column.dtype.kind in "fb" or np.array_equal(column, array)
            if exact and np.isfinite(column.astype(np.float64)).all():
                return column
        numbers = "whole numbers from 0 to 255" if image else f"numbers of {dtype.name}"
        raise BadRow(f"{name}: it must hold finite {numbers} only")

    @property
    def noise_type(self) -> Any:
        """Returns the type of a generator's noise."""
        return next(iter(self._specs.values())).dtype


def _listed(names: Any) -> str:
    """Returns the sorted names with commas for an error, at most 200 characters."""
    return ", ".join(sorted(map(str, names)))[:200] or "nothing"
