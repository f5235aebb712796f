"""The cost model, and what the GPU benchmarks say where there is no GPU."""

import json

import pytest
import torch

from traformer.benchmarks import predict
from traformer.cli import main

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_more_keys_take_longer_and_decays_save_them():
    device = predict.DEVICES["a100"]
    times = {
        (length, decay): predict.predict(device, length, decay, "forward", 16, 64)["ms"]
        for length in (512, 2048) for decay in ("init", "never")
    }  # fmt: skip
    assert times[2048, "init"] < times[2048, "never"] and times[512, "never"] < times[2048, "never"]
    both = predict.predict(device, 2048, "never", "both", 16, 64)
    assert both["ms"] > 2 * times[2048, "never"] and both["flash_ms"] > 0
    faster = predict.predict(predict.DEVICES["h100"], 2048, "never", "both", 16, 64)
    assert faster["ms"] < both["ms"]


def test_keys_read_are_those_of_whole_blocks():
    read = predict.keys_read(256, "never", 64, 64, 32, False)
    assert 128 <= read <= 128 + 64
    assert predict.keys_read(1024, "init", 64, 64, 32, False) < predict.keys_read(1024, "init", 64, 128, 64, True)


def test_prediction_beside_measurement(tmp_path, capsys):
    file = tmp_path / "attention.json"
    file.write_text(
        json.dumps({"rows": [{"method": "tra", "length": 512, "decay": "never", "pass": "both", "ms": 1.25}]})
    )
    assert main(["bench", "predict", "--lengths", "512", "--decays", "never", "--measured", str(file)]) == 0
    output = capsys.readouterr().out
    assert "not measured" in output and "1.250" in output and "A100" in output and "H100" in output


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["predict", "--devices", "a200"], "unknown device 'a200'"),
        (["predict", "--measured", "nowhere.json"], "--measured nowhere.json"),
        (["gpu", "--name", "a/b"], "letters, digits"),
        pytest.param(["gpu", "--name", "x"], "torch sees no GPU", marks=no_gpu),
        pytest.param(["attention", "--device", "cuda"], "torch sees no GPU", marks=no_gpu),
        pytest.param(["train", "--device", "cuda", "--no-memory"], "torch sees no GPU", marks=no_gpu),
        (["attention", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments, message, capsys):
    assert main(["bench", *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
