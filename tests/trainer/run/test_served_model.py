"""Tests the server of an exported model: an answer depends on its row alone, and no request ends
it."""

import asyncio
import base64
import io
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import requests
import tensorflow as tf
import uvicorn
from keras import Input, Model, Sequential, layers, losses, ops
from keras.models import load_model
from keras.utils import set_random_seed
from numpy.random import default_rng
from numpy.testing import assert_allclose
from PIL import Image

from tests.drill import read
from tests.fixtures import Capture, Folders, Log, Patch, parametrize
from tests.support import read_lines, refused
from tests.workers import until
from trainer import predict as command
from trainer import serve
from trainer.base.errors import USER_MUST_CHANGE, UserError
from trainer.base.run_files.serving_file import model_folder, read_servable
from trainer.base.storage.gcs import connect
from trainer.base.storage.local_files import Address
from trainer.run import http_server as server_module
from trainer.run.export import export, load_template
from trainer.run.http_server import MOST_BYTES, Server
from trainer.run.served_model import BadRow, ServedModel

pytestmark = pytest.mark.exports


def network() -> Model:
    set_random_seed(3)
    image = Input((12, 12, 1), name="image")
    x = layers.Conv2D(16, 3, activation="relu")(layers.Rescaling(1 / 255)(image))
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    return Model(image, layers.Dense(10, activation="softmax")(x))


def two_inputs() -> Model:
    set_random_seed(4)
    size = Input((3,), name="size")
    word = Input((), dtype="string", name="word")
    hashed = layers.Hashing(8, output_mode="one_hot")(layers.Reshape((1,))(word))
    both = layers.Concatenate()([size, hashed])
    outputs = {"price": layers.Dense(1)(both), "kind": layers.Dense(2)(both)}
    return Model({"size": size, "word": word}, outputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Folders) -> Path:
    path = tmp_path_factory.mktemp("image") / "model"
    export(network(), path, None, image=(12, 12, 1), class_names=())
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return ServedModel(folder, "run")


@contextmanager
def serving(
    load: Callable[[], ServedModel],
    stop: Callable[[Exception], None] = lambda error: None,
    healthy: int = 200,
) -> Iterator[str]:
    """Yields the address of a real server in a thread of this process, once its /health answers
    `healthy`."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(Server(load, stop).application(), log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        until(lambda: requests.get(f"{url}/health", timeout=30).status_code == healthy)
        yield url
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def post(url: str, content: bytes | list[Any]) -> requests.Response:
    body = content if isinstance(content, bytes) else json.dumps({"instances": content}).encode()
    return requests.post(f"{url}/predict", body, timeout=30)


@pytest.fixture(scope="module")
def url(model: ServedModel) -> Iterator[str]:
    with serving(lambda: model) as address:
        yield address


def images(count: int) -> Any:
    return default_rng(0).integers(0, 256, (count, 12, 12, 1), np.uint8)


def predictions(url: str, rows: Any) -> Any:
    return np.array(post(url, rows).json()["predictions"])


def served(network: Model, folder: Path, **about: Any) -> ServedModel:
    """Returns what serves a network that is exported below a folder."""
    export(network, folder / "model", None, **about)
    return ServedModel(folder / "model", "run")


def answered(model: ServedModel, instances: list[Any]) -> list[Any]:
    """Returns the answers of rows of one shape."""
    ((_, columns),), errors = model.parse(instances)
    assert not errors
    return model.answer(columns)


def lines_of(out: Path, name: str, parts: int = 1) -> list[Any]:
    """Returns the lines of the first parts of what a prediction wrote under a name."""
    files = (out / f"{name}-{part:05}.jsonl" for part in range(parts))
    return [line for file in files for line in read_lines(file)]


def test_an_answer_is_the_same_up_to_rounding_in_every_batch(
    folder: Path, model: ServedModel, url: str
) -> None:
    rows = images(40)
    draw = random.Random(1)
    loaded = load_model(folder / "model.keras")
    alone = np.array([answered(model, [row.tolist()])[0] for row in rows])
    assert_allclose(alone, loaded(tf.cast(rows, tf.float32), training=False), atol=1e-6)
    for _ in range(5):
        first = 0
        while first < len(rows):
            last = first + draw.randint(1, 15)
            found = predictions(url, rows[first:last].tolist())
            assert_allclose(found, alone[first:last], atol=1e-6)
            first = last
    assert_allclose(predictions(url, rows.tolist()), alone, atol=1e-6)


def test_images_are_decoded_as_in_training(url: str) -> None:
    (row,) = images(1)
    buffer = io.BytesIO()
    Image.fromarray(row[..., 0]).save(buffer, "PNG")
    coded = {"b64": base64.b64encode(buffer.getvalue()).decode()}
    first, *others = predictions(url, [row.tolist(), coded, {"image": coded}])
    assert_allclose(others, [first, first], atol=1e-6)


def test_inputs_have_names(tmp_path: Path) -> None:
    model = served(two_inputs(), tmp_path)
    row = {"size": [1, 2.5, 3], "word": "ä"}
    (answer,) = answered(model, [row])
    assert {name: len(values) for name, values in answer.items()} == {"kind": 2, "price": 1}
    assert [
        (tensor["name"], tensor["datatype"], tensor["shape"])
        for tensor in model.metadata()["inputs"]
    ] == [("size", "FP32", [-1, 3]), ("word", "BYTES", [-1])]
    for bad, line in (
        ({"size": [1, 2, 3]}, "it has size, and it must be an object with size, word"),
        ([1], "it must be an object with size, word"),
        ({"size": [1, 2, 3], "word": 7}, "word: it must be text"),
        ({"size": [[1]], "word": "a"}, "size: it must have the shape [3], and has [1, 1]"),
        (
            {"size": ["a", "b", "c"], "word": "a"},
            "size: it must hold finite numbers of float32 only",
        ),
        ({"size": [1e300, 0, 0], "word": "a"}, "size: it must hold finite"),
        ({"size": [float("inf"), 0, 0], "word": "a"}, "size: it must hold finite"),
        ({"size": [1, [2], 3], "word": "a"}, "size: it must have the shape [3]"),
    ):
        _, errors = model.parse([row, bad, row])
        assert [*errors] == [1]
        assert str(errors[1]).startswith(line)


def tokens() -> Model:
    word = Input((2,), dtype="int32", name="word")
    return Model(word, layers.Flatten()(layers.Embedding(5, 3)(word)))


def test_a_row_that_the_model_cannot_compute_fails_alone(tmp_path: Path) -> None:
    """The rows of other requests in its batch, and the other lines of its file, are answered."""
    model = served(tokens(), tmp_path)
    problem = "the model cannot compute it: indices[0,1] = 9 is not in [0, 5)"
    good = answered(model, [[1, 2], [4, 0]])

    async def requested() -> list[Any]:
        batcher = server_module.Batcher(model)
        rows = [[1, 2]], [[4, 0], [3, 9]], [[4, 0]]
        return await asyncio.gather(*(batcher.answer(model.parse(of)[0][0][1]) for of in rows))

    first, (beside, refused_one), last = asyncio.run(requested())
    assert (first, [beside], last) == ([good[0]], [good[1]], [good[1]])
    assert isinstance(refused_one, BadRow)
    assert str(refused_one) == problem
    (tmp_path / "rows.jsonl").write_text("[1, 2]\n[3, 9]\n[4, 0]\n{")
    out = tmp_path / "out"
    flags = [f"--rows_file={tmp_path}/rows.jsonl", f"--out={out}"]
    assert command.main([f"{tmp_path}/model", *flags]) == 0
    assert lines_of(out, "predictions") == [
        {"row": 0, "prediction": good[0]},
        {"row": 2, "prediction": good[1]},
    ]
    first_error, second_error = lines_of(out, "errors")
    assert first_error == {"row": 1, "error": problem}
    assert second_error["row"] == 3


def test_a_generator_draws_by_seed_and_label(tmp_path: Path) -> None:
    noise = Input((4,))
    label = Input((), dtype="int32")
    both = layers.Concatenate()([noise, layers.CategoryEncoding(3, output_mode="one_hot")(label)])
    image = layers.Reshape((4, 4, 1))(layers.Dense(16, activation="tanh")(both))
    generator = Model([noise, label], image)
    generator.sample = lambda *_: None
    generator.latent_dim = 4
    generator.generated_classes = 3
    model = served(generator, tmp_path, image=(4, 4, 1))
    # Clients of protobuf write whole numbers as 7.0.
    first, again, other, _ = answered(
        model, [{"seed": seed, "label": seed % 3} for seed in (7, 7.0, 8, 0)]
    )
    assert first == again != other
    assert Image.open(io.BytesIO(base64.b64decode(first["b64"]))).size == (4, 4)
    for bad, line in (
        ({"seed": 7}, "with whole numbers for label, seed"),
        ({"seed": -1, "label": 0}, "seed=-1: use a number from 0"),
        ({"seed": 7, "label": 3}, "the classes are 0 to 2"),
        ({"seed": 7.5, "label": 0}, "whole numbers"),
        (7, "whole numbers"),
        ({"seed": True, "label": 0}, "whole numbers"),
    ):
        assert line in str(model.parse([bad])[1][0])


def test_an_answer_that_is_not_finite_is_an_error_of_its_row(tmp_path: Path) -> None:
    x = Input((3,))
    model = served(Model(x, ops.log(x)), tmp_path)
    first, second = answered(model, [[1.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
    assert "the model answers with inf or nan" in str(first)
    assert second == [0.0, 0.0, 0.0]


@parametrize("from_logits", [True, False])
def test_a_classifier_answers_with_label_and_probabilities(
    from_logits: bool, tmp_path: Path
) -> None:
    network = Sequential([Input((3,)), layers.Activation("linear" if from_logits else "softmax")])
    network.compile(loss=losses.SparseCategoricalCrossentropy(from_logits=from_logits))
    model = served(network, tmp_path, class_names=("ant", "bee", "cat"))
    (answer,) = answered(model, [[0.0, 1.0, -800.0]])
    assert answer["label"] == "bee"
    assert answer["probabilities"] == pytest.approx([1 / (1 + np.e), np.e / (1 + np.e), 0])
    assert answer["predictions"] == (
        [0.0, 1.0, -800.0] if from_logits else pytest.approx(answer["probabilities"])
    )
    assert [tensor["name"] for tensor in model.metadata()["outputs"]] == [*answer]
    assert model.metadata()["parameters"] == {"class_names": ["ant", "bee", "cat"]}


def test_rows_of_several_lengths_are_answered_together(tmp_path: Path) -> None:
    x = Input((None,))
    model = served(Model(x, ops.sum(x, axis=1, keepdims=True)), tmp_path)
    with serving(lambda: model) as url:
        found = predictions(url, [[1], [1, 2], [3], [1, 2, 3]])
        shown = requests.get(f"{url}/v2/models/model", timeout=30).json()
    assert found.tolist() == [[1.0], [3.0], [3.0], [6.0]]
    assert shown["inputs"][0]["shape"] == [-1, -1]


HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"{}",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"instances": []}',
    b'{"instances": 3}',
    *(
        b'{"instances": [' + instance + b"]}"
        for instance in (
            b"NaN",
            b"[[[1e999]]]",
            b'{"b64": "!!"}',
            b'{"b64": "aGFsbG8="}',
            b"null",
            b'{"b64": {}}',
            b'{"__reduce__": 1}',
            b"[[[256]]]",
            b'["a", [1]]',
            b'{"image": 1, "x": 2}',
            b"1" * 5000,
            b"[[[1.5]]]",
        )
    ),
]


def test_hostile_requests_are_refused_in_one_line_and_the_server_lives(url: str) -> None:
    draw = random.Random(0)
    good = json.dumps({"instances": images(1).tolist()}).encode()
    mutated = [good[: draw.randrange(len(good))] for _ in range(20)]
    for body, status in [
        *((body, 400) for body in (*HOSTILE, *mutated)),
        (b" " * (MOST_BYTES + 1), 413),
    ]:
        sent = post(url, body)
        assert (sent.status_code, "\n" in sent.json()["error"]) == (status, False), body[:60]
    for path, status in (("nothing", 404), ("predict", 405)):
        sent = requests.get(f"{url}/{path}", timeout=30)
        assert (sent.status_code, [*sent.json()]) == (status, ["error"])
    missing = post(url, b'{"rows": [1]}').json()["error"]
    assert missing == 'the body must be JSON as {"instances": […]}: the key instances is missing'
    assert post(url, good).status_code == 200


def test_a_body_that_does_not_come_or_is_too_large_by_its_header_is_refused(
    url: str, monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setattr(server_module, "_BODY_S", 0.2)
    port = int(url.rpartition(":")[2])
    # the last client goes
    for length, reply in ((100, b"HTTP/1.1 408"), (10**12, b"HTTP/1.1 413"), (9, b"")):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(
                b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % length
            )
            assert not reply or connection.recv(100).startswith(reply)
    assert requests.get(f"{url}/health", timeout=30).status_code == 200
    assert "a request failed" not in caplog.text


@parametrize(
    "most_rows, expected",
    [(8, [[1] * 8, [2, 3, 3, 1, 1]]), (2, [[1] * 2, [2], [3, 3], *[[1] * 2] * 4])],
)
def test_requests_that_wait_share_a_call(most_rows: int, expected: list[list[int]]) -> None:
    """A large request waits for its next part behind the others, and each gets the answers to its
    own rows."""
    calls: list[list[int]] = []

    def answer(columns: Any) -> list[int]:
        calls.append(columns[0].tolist())
        return calls[-1]

    async def answered() -> list[list[int]]:
        batcher = server_module.Batcher(
            cast(ServedModel, SimpleNamespace(most_rows=most_rows, answer=answer))
        )
        return await asyncio.gather(*(batcher.answer((np.array(rows),)) for rows in requests))

    requests = [[1] * 10, [2], [3, 3]]
    assert asyncio.run(answered()) == requests
    assert calls == expected


def test_a_request_that_the_stopping_server_gives_up_is_told_so() -> None:
    """Uvicorn cancels what is open when its time for open requests is over; the model still
    computes."""
    computing = threading.Event()
    over = threading.Event()
    sent = list[Any]()

    def answer(columns: Any) -> list[int]:
        computing.set()
        over.wait(30)
        return [1]

    model = SimpleNamespace(
        most_rows=8, answer=answer, parse=lambda rows: ([([0], (np.array(rows),))], {})
    )
    app = Server(lambda: cast(ServedModel, model), lambda error: None).application()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"instances": [1]}'}

    async def send(message: Any) -> None:
        sent.append(message)

    async def cancelled() -> None:
        async with app.router.lifespan_context(app):
            while not computing.is_set():  # until then the model is being loaded
                scope = {
                    "type": "http",
                    "method": "POST",
                    "path": "/predict",
                    "headers": [],
                    "query_string": b"",
                }
                request = asyncio.create_task(app(scope, receive, send))
                await asyncio.wait([request], timeout=0.1)
            request.cancel()
            await request
            over.set()

    asyncio.run(cancelled())
    assert sent[-2]["status"] == 503
    assert b"the server stops" in sent[-1]["body"]


def test_requests_that_are_too_many_are_refused(url: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(server_module, "_WAITING_BYTES", 5_000)
    sent = post(url, images(1).tolist())
    assert (sent.status_code, sent.headers["Retry-After"]) == (503, "2")


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    def load() -> ServedModel:
        raise AssertionError("it was loaded")

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        refused("it cannot be opened at 127.0.0.1"),
    ):
        server_module.serve(load, "127.0.0.1", taken.getsockname()[1])


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.keras"
    file.touch()
    for path in (tmp_path / "nowhere", tmp_path, file):
        with refused(
            "x: there is no serving.json: name the job directory of a run that is done, or its"
            " model/"
        ):
            read_servable(model_folder(str(path)), "x")


def test_a_model_of_a_version_before_0_3_is_refused_and_one_of_0_3_is_read(
    folder: Path, tmp_path: Path
) -> None:
    content = read(folder / "serving.json")
    file = tmp_path / "serving.json"
    file.write_text(json.dumps({**content, "fixed_batch": 8}))  # as 0.3.0 wrote it
    assert read_servable(tmp_path, "x", whole=False).inputs == content["inputs"]
    del content["scores"]
    file.write_text(json.dumps(content))
    with refused("x: written by a version before 0.3: use vertex-trainer 0.3 to read it"):
        read_servable(tmp_path, "x")


def test_a_server_says_503_until_its_model_is_loaded_and_stops_without_one(tmp_path: Path) -> None:
    failed: list[Exception] = []

    def load() -> ServedModel:
        return ServedModel(tmp_path, "gs://b/run")

    with serving(load, failed.append, healthy=503) as url:
        assert post(url, b"{}").status_code == 503
        until(lambda: [type(error) for error in failed] == [UserError])


def test_in_a_container_of_vertex_ai_its_variables_count(folder: Path, monkeypatch: Patch) -> None:
    """Here the server binds to this machine alone."""
    served: list[Any] = []
    monkeypatch.setattr(
        "trainer.run.http_server.serve", lambda load, *where: served.append((load(), *where))
    )
    assert serve.main([str(folder)]) == 0
    for name, value in (
        ("HTTP_PORT", "9001"),
        ("STORAGE_URI", str(folder)),
        ("HEALTH_ROUTE", "/alive"),
        ("PREDICT_ROUTE", "/v1/answer"),
    ):
        monkeypatch.setenv(f"AIP_{name}", value)
    assert serve.main([]) == 0
    assert [where for _, *where in served] == [["127.0.0.1", 8080], ["0.0.0.0", 9001]]
    app = Server(lambda: served[1][0], lambda error: None).application()
    assert [route.path for route in app.routes] == ["/v1/answer", "/alive", "/v2/models/model"]  # type: ignore[attr-defined]


def test_a_lambda_is_served_and_never_unpickled(tmp_path: Path) -> None:
    doubled = layers.Lambda(lambda x: 2 * x, output_shape=(2,))
    model = served(Sequential([Input((2,)), doubled]), tmp_path)
    with pytest.raises(UserError, match=r"Keras cannot load it: .*[Ll]ambda"):
        load_template(tmp_path / "model" / "model.keras", "run")
    assert answered(model, [[1, 2.5]]) == [[2.0, 5.0]]


def test_rows_of_a_bucket_are_answered_into_a_bucket(
    folder: Path, model: ServedModel, bucket: Address
) -> None:
    connect().upload(json.dumps(images(1)[0].tolist()).encode(), bucket / "rows.jsonl")
    assert command.main([str(folder), f"--rows_file={bucket}rows.jsonl", f"--out={bucket}out"]) == 0
    (written,) = (
        one for one in connect().list(bucket / "out") if "predictions" in str(one.address)
    )
    found = json.loads(connect().read(written))["prediction"]
    assert_allclose(found, answered(model, images(1).tolist())[0], atol=1e-6)


def test_rows_of_a_file_are_answered_as_by_a_server(
    folder: Path, model: ServedModel, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Lines that cannot be read are named; the same command again goes on after the parts that are
    there."""
    monkeypatch.setattr("trainer.run.prediction_files.PART_ROWS", 10)
    lines = [json.dumps(row.tolist()) for row in images(25)]
    lines[3] = "{"
    lines[12] = "[[1]]"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    flags = [str(folder), f"--rows_file={tmp_path}/rows.jsonl", f"--out={out}"]
    assert command.main(flags) == 0
    (out / "predictions-00001.jsonl").unlink()
    (out / "predictions-00002.jsonl").write_text("kept")
    assert command.main(flags) == 0
    assert f"{out} holds 23 answers; 2 rows have none" in capsys.readouterr().out
    assert read(out / "answers_of.json")["model"] == dict(model.about.files)
    assert (out / "predictions-00002.jsonl").read_text() == "kept"
    assert [entry["row"] for entry in lines_of(out, "errors", 2)] == [3, 12]
    answers = lines_of(out, "predictions", 2)
    assert [entry["row"] for entry in answers] == [*range(3), *range(4, 12), *range(13, 20)]
    expected = answered(model, [json.loads(lines[5])])[0]
    assert_allclose(answers[4]["prediction"], expected, atol=1e-6)

    (tmp_path / "other.jsonl").write_text("\n".join([*lines, "[[2]]"]))
    (tmp_path / "wrong.jsonl").write_text("{")
    for rows, where, line in (
        ("rows", "answers.jsonl", "it becomes a folder of several files: use a name without a dot"),
        ("other", "out", f"out={out}: its answers differ from these in rows: use another --out"),
        ("missing", "out", "missing.jsonl: there is no such file"),
        ("wrong", "new", ""),  # no row was answered
    ):
        flags = [f"--rows_file={tmp_path / rows}.jsonl", f"--out={tmp_path / where}"]
        assert command.main([str(folder), *flags]) == USER_MUST_CHANGE
        assert line in capsys.readouterr().err
