"""Streaming generation: the text that comes is that of the tokens, whatever way they are chosen."""

from __future__ import annotations

import pytest
import torch

from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.errors import InputError
from traformer.evaluation.generate import Generation, Sampling, generate_from_run, generate_text
from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.tasks import Copy, FlipFlop
from traformer.training.loop import train


def random_model(vocab_size: int, attention: str = "tra") -> TraformerForCausalLM:
    torch.manual_seed(0)
    config = TraformerConfig(
        attention=attention, vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = TraformerForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(100.0)
    return model


class Bytes:
    """A stand-in for the text task: a token is a byte, so most characters beyond ASCII take several."""

    name, vocab_size, pad_id, token_names, end_id = "bytes", 256, None, (), None

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_pieces_make_up_the_text_and_the_tokens():
    task = FlipFlop(length=64)
    model, pieces = random_model(task.vocab_size), []
    result = generate_text(model, task, "w 1 i 0 r", max_new_tokens=20, on_text=pieces.append)
    assert len(result.ids) == 20 and result.ended_by == "length" and len(pieces) > 1
    assert "".join(pieces) == result.text
    assert task.decode(result.prompt_ids + result.ids) == "w 1 i 0 r" + result.text
    inputs = torch.tensor([result.prompt_ids])
    assert model.generate(inputs, max_new_tokens=20, do_sample=False)[0].tolist() == result.prompt_ids + result.ids


def test_characters_of_several_bytes_come_whole(monkeypatch):
    task = Bytes()
    model = random_model(256)
    said = "grüße, 世界 🎉!".encode()

    def spell(inputs, streamer, **kwargs):
        streamer.put(inputs)
        for byte in said:
            streamer.put(torch.tensor([byte]))
        streamer.end()

    monkeypatch.setattr(model, "generate", spell)
    pieces = []
    result = generate_text(model, task, "ä", on_text=pieces.append)
    assert result.text == said.decode() and pieces == list(said.decode())


def test_the_end_token_ends_it():
    task = Copy(max_length=4)
    model = random_model(task.vocab_size)
    end = task.end_id
    assert task.token_names[end] == "<eos>"
    with torch.no_grad():  # a model that always says it
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.lm_head.weight[end] = 1.0
        model.lm_head.register_forward_hook(lambda m, a, out: out + torch.eye(task.vocab_size)[end] * 9)
    result = generate_text(model, task, "<bos>", max_new_tokens=5)
    assert result.ids == [end] and result.ended_by == "end" and result.text.strip() == "<eos>"


def test_sampling_follows_the_seed():
    task = FlipFlop(length=64)
    model = random_model(task.vocab_size)

    def draw(**kwargs):
        return generate_text(model, task, "w 1", max_new_tokens=40, sampling=Sampling(**kwargs)).ids

    assert draw(temperature=20.0, seed=1) == draw(temperature=20.0, seed=1) != draw(temperature=20.0, seed=2)
    assert draw(temperature=20.0, top_k=1, seed=3) == draw(temperature=0.0)


def test_an_interrupt_keeps_what_there_is():
    task = FlipFlop(length=64)
    model, pieces = random_model(task.vocab_size), []

    def stop_after_three(text):
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    result = generate_text(model, task, "w 1", max_new_tokens=50, on_text=stop_after_three)
    assert result.ended_by == "interrupted" and result.ids and "".join(pieces) == result.text
    assert task.encode(result.text) == result.ids


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": "w 1 q"}, "unknown flip_flop token 'q'"),
    ],
)
def test_bad_prompts(kwargs, sentence):
    task = FlipFlop(length=64)
    with pytest.raises(InputError, match=sentence):
        generate_text(random_model(task.vocab_size), task, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be in"),
        ({"top_k": 3}, "give a temperature above 0"),
    ],
)
def test_bad_sampling(kwargs, sentence):
    with pytest.raises(InputError, match=sentence):
        Sampling(**kwargs)


def test_the_command(tmp_path, capsys):
    run = tmp_path / "run"
    train(tiny_config(), run)
    capsys.readouterr()
    result = generate_from_run(run, "w 1 r", max_new_tokens=4, device="cpu")
    assert isinstance(result, Generation) and len(result.ids) == 4
    assert main(["generate", str(run), "--prompt", "w 1 r", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "w 1 r" + result.text + "\n"
    assert main(["generate", str(run), "--prompt", "w 1 x"]) == 2
    assert "tra: error: unknown flip_flop token 'x'" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "absent"), "--prompt", "w"]) == 2
    assert "there is no run folder" in capsys.readouterr().err
