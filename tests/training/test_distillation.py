"""Tuning a converted model: what the two objectives compute, what learns, and that the runs are durable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import traformer
from tests.models.test_convert import source
from tests.training.test_parallel import assert_close_runs, train_with
from tests.training.tiny_llama import text_folder, tiny_llama
from traformer.errors import InputError, RunError
from traformer.models.conversion.families import FAMILIES
from traformer.models.from_run import load_run
from traformer.models.pretrained import settings_from
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.training.distillation import LayerLoss, LogitLoss, new_layers, relative_error
from traformer.training.loop import train
from traformer.training.trained_weights import LowRankLinear, choose_trained, merged

LENGTH = 24
HYBRID = {"attention": ["rope", "tra_straight_through"], "rope": {"sliding_window": 12, "sinks": 2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("upcycle")
    source = tiny_llama(root / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    traformer.convert(model, **HYBRID).save_pretrained(root / "hybrid")
    shutil.copy(source / "tokenizer.json", root / "hybrid")
    return {"source": source, "hybrid": root / "hybrid", "text": text_folder(root / "text")}


def config_of(folders: dict[str, Path], **changes) -> RunConfig:
    settings = settings_from(folders["hybrid"])
    settings["task_options"] |= {"data": [str(folders["text"])], "length": LENGTH}
    settings |= {"from_model": str(folders["hybrid"]), "steps": 4, "batch_size": 4, "lr": 1e-3, "threads": 1}
    settings |= {"log_every": 1, "save_every": 2, "keep": 9}
    if changes.get("objective", "answers") != "answers":
        settings["teacher"] = str(folders["source"])
    return RunConfig(**{**settings, **changes})


def models(folders: dict[str, Path], attention="tra", **options):
    teacher = AutoModelForCausalLM.from_pretrained(folders["source"]).double().eval()
    return traformer.convert(teacher, attention, **options), teacher


def batch(folders: dict[str, Path]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 200, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    answers = torch.ones_like(ids, dtype=torch.bool)
    answers[:, 0] = False
    return ids, answers


# What the objectives compute ----------------------------------------------------------------------------------


def test_layers_are_compared_on_the_teachers_own_inputs(folders):
    model, teacher = models(folders)
    ids, answers = batch(folders)
    loss, right = LayerLoss(model, teacher, LENGTH)(ids, answers)
    hidden = teacher.model(ids, output_hidden_states=True).hidden_states
    errors = []
    for index, block in enumerate(teacher.model.layers):
        given = block.input_layernorm(hidden[index])
        positions = teacher.model.rotary_emb(given, torch.arange(LENGTH)[None])
        wanted = block.self_attn(given, positions, None)[0]
        made = model.model.layers[index].self_attn.mix(given, _context(model, given))[0]
        errors.append((made - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2)))
    assert right is None
    torch.testing.assert_close(loss, torch.stack(errors).mean().float() * answers[:, 1:].sum())


def _context(model, x):
    from traformer.layers.context import make_context

    context, _ = make_context(x, None, None, None, None, None)
    context.shared[0] = model.model.attention_layers[0].prepare(context, x)
    return context


def test_a_layer_that_is_the_sources_own_has_no_error_and_one_whose_window_cuts_has(folders):
    ids, answers = batch(folders)
    for window, differs in ((LENGTH, False), (LENGTH // 2, True)):
        model, teacher = models(folders, "rope", sliding_window=window)
        assert bool(new_layers(model, LENGTH)) == differs
        if differs:
            assert LayerLoss(model, teacher, LENGTH)(ids, answers)[0] > 1e-3
        else:
            with pytest.raises(InputError, match="nothing to learn"):
                LayerLoss(model, teacher, LENGTH)
    model, _ = models(folders, "rope")
    loss = LayerLoss(models(folders, "rope", sliding_window=LENGTH - 1)[0], teacher, LENGTH)
    loss.model = model  # the same layers without a window
    assert loss(ids, answers)[0] < 1e-9


def test_no_gradient_passes_from_one_layer_to_another(folders):
    ids, answers = batch(folders)
    model, teacher = models(folders)
    LayerLoss(model, teacher, LENGTH)(ids, answers)[0].backward()
    together = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert together and all(".self_attn." in name for name in together)
    for index in range(model.config.num_hidden_layers):
        model.zero_grad()
        one = LayerLoss(model, teacher, LENGTH)
        one.layers = [index]
        one(ids, answers)[0].backward()
        for name, parameter in model.named_parameters():
            if f".{index}.self_attn." in name:
                torch.testing.assert_close(parameter.grad / model.config.num_hidden_layers, together[name])
            else:
                assert parameter.grad is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_teach(family):
    teacher = source(family).eval()
    model = traformer.convert(teacher, "tra")
    ids = torch.randint(1, 20, (2, 9), generator=torch.Generator().manual_seed(1))
    answers = torch.ones_like(ids, dtype=torch.bool)
    for loss in (LayerLoss(model, teacher, 9), LogitLoss(model, teacher, 1.0)):
        model.zero_grad()
        value, _ = loss(ids, answers)
        value.backward()
        assert value.isfinite() and value > 0
        for layer in model.base_model.attention_layers:
            assert all(
                p.grad is not None and p.grad.abs().sum() > 0 for p in (layer.q_proj.weight, layer.o_proj.weight)
            )


def test_relative_error_is_one_for_nothing_at_all():
    wanted = torch.randn(2, 3, 4)
    assert torch.equal(relative_error(torch.zeros_like(wanted), wanted), torch.ones(2))
    assert torch.equal(relative_error(wanted, wanted), torch.zeros(2))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_logits_loss_is_kl_and_cross_entropy_with_their_gradients(folders, share, monkeypatch):
    monkeypatch.setattr("traformer.models.loss.CHUNK_ELEMENTS", 2000)  # several chunks
    ids, answers = batch(folders)
    model, teacher = models(folders)
    loss, right = LogitLoss(model, teacher, share)(ids, answers)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    made, wanted = (m(ids).logits[:, :-1].flatten(0, 1).log_softmax(-1) for m in (model, teacher.requires_grad_(False)))
    targets = ids[:, 1:].flatten()
    plain = share * (wanted.exp() * (wanted - made)).sum() - (1 - share) * made.gather(1, targets[:, None]).sum()
    plain.backward()
    torch.testing.assert_close(loss, plain)
    assert right == (made.argmax(-1) == targets).sum()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-6, atol=1e-9)


# What learns --------------------------------------------------------------------------------------------------


def learning(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_which_weights_learn(folders):
    everything = learning(models(folders)[0])
    expected = {
        ("all", None): everything,
        ("attention", None): {name for name in everything if ".self_attn." in name},
    }
    for (which, rank), names in expected.items():
        model, _ = models(folders)
        choose_trained(model, config_of(folders, train_only=which, lora=rank))
        assert learning(model) == names
    model, _ = models(folders)
    choose_trained(model, config_of(folders, train_only="attention"), layers=[1])
    assert learning(model) == {name for name in everything if ".1.self_attn." in name}
    for which, matrices in (("attention", 4), ("all", 7)):  # q, k, v, o; gate, up, down
        model, _ = models(folders)
        choose_trained(model, config_of(folders, train_only=which, lora=2))
        updates = {name for name in learning(model) if "lora" in name}
        assert len(updates) == 2 * matrices * model.config.num_hidden_layers
        assert all("decay_proj" in name for name in learning(model) - updates)  # what is new learns whole


def test_low_rank_updates_start_at_nothing_and_merge_into_the_weights():
    torch.manual_seed(0)
    plain = torch.nn.Linear(6, 5)
    layer = LowRankLinear.around(plain, 2)
    x = torch.randn(3, 6)
    assert torch.equal(layer(x), plain(x))
    torch.nn.init.normal_(layer.lora_b)
    alone = torch.nn.Linear(6, 5)
    alone.load_state_dict(
        {name[2:]: value for name, value in merged({f"a.{n}": v for n, v in layer.state_dict().items()}).items()}
    )
    torch.testing.assert_close(alone(x), layer(x))
    assert not layer.weight.requires_grad and layer.lora_a.requires_grad


def test_new_parameters_learn_ten_times_as_fast(folders):
    model, _ = models(folders)
    choose_trained(model, config_of(folders, objective="layers"))
    layer = model.model.attention_layers[0]
    assert layer.decay_proj.weight.lr_scale == 10 and not hasattr(layer.q_proj.weight, "lr_scale")


# The runs -----------------------------------------------------------------------------------------------------

RUNS = {
    "layers": {"objective": "layers"},
    "logits": {"objective": "logits", "teacher_weight": 0.5},
    "attention": {"objective": "logits", "train_only": "attention"},
    "low rank": {"objective": "logits", "lora": 2},
    "tokens": {},
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind, folders, tmp_path):
    config = config_of(folders, **RUNS[kind])
    train(config, tmp_path / "whole", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-4")
    train(RunFolder(tmp_path / "cut").read_config(), tmp_path / "cut", resume=True, quiet=True)
    whole, again = (load_file(tmp_path / name / "checkpoints/step-4/model.safetensors") for name in ("whole", "cut"))
    started = load_file(folders["hybrid"] / "model.safetensors")
    assert whole.keys() == again.keys() == started.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    moved = {name for name in whole if not torch.equal(whole[name], started[name])}
    assert moved and (kind not in ("layers", "attention") or all(".self_attn." in name for name in moved))
    lines = RunFolder(tmp_path / "whole").read_metrics()
    assert lines[-1]["loss"] < lines[0]["loss"] and (lines[0]["accuracy"] is None) == (kind == "layers")


def test_a_tuned_run_needs_its_start_no_more_and_its_checkpoint_loads_like_any_model(folders, tmp_path):
    shutil.copytree(folders["hybrid"], tmp_path / "hybrid")
    config = config_of({**folders, "hybrid": tmp_path / "hybrid"}, objective="layers")
    train(config, tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "hybrid")
    model, task, _, step = load_run(tmp_path / "run")
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / f"step-{step}").eval()
    ids = torch.tensor([task.encode("line 7 of 12")])
    assert torch.equal(model(ids).logits, same(ids).logits)
    assert same.get_output_embeddings().weight is same.get_input_embeddings().weight
    train(RunFolder(tmp_path / "run").read_config(), tmp_path / "run", resume=True, quiet=True)


def test_low_rank_runs_need_their_start_to_resume_and_say_so(folders, tmp_path):
    shutil.copytree(folders["hybrid"], tmp_path / "hybrid")
    config = config_of({**folders, "hybrid": tmp_path / "hybrid"}, lora=2)
    train(config, tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "hybrid")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    with pytest.raises(RunError, match="neither a run folder nor a saved model"):
        train(config, tmp_path / "run", resume=True, quiet=True)
    load_run(tmp_path / "run")  # while what it has learned needs nothing


@pytest.mark.parametrize(
    "objective,kind",
    [
        ("layers", "ddp"),
        ("logits", "fsdp"),
        pytest.param("layers", "fsdp", marks=pytest.mark.slow),
        pytest.param("logits", "ddp", marks=pytest.mark.slow),
    ],
)
def test_two_processes_are_one_to_rounding(kind, objective, folders, tmp_path):
    config = config_of(folders, objective=objective)
    train(config, tmp_path / "one", quiet=True)
    train_with(tmp_path / "two", config, kind)
    assert_close_runs(tmp_path / "one", tmp_path / "two", 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "layers", "teacher": None}, "needs a teacher"),
        ({"teacher": "some"}, "needs no teacher"),
        ({"teacher_weight": 0.5}, "teacher_weight is for objective 'logits'"),
        ({"objective": "layers", "from_model": None}, "give --from"),
        ({"lora": 2, "from_model": None}, "give --from"),
    ],
)
def test_settings_that_do_not_go_together(changes, words, folders):
    with pytest.raises(InputError, match=words):
        config_of(folders, **changes)


def test_another_model_is_no_teacher(folders, tmp_path):
    other = tiny_llama(tmp_path / "other", layers=2)
    config = config_of(folders, objective="logits").replace(teacher=str(other))
    with pytest.raises(InputError, match="num_hidden_layers 2 and the model 4; give the model that was converted"):
        train(config, tmp_path / "run", quiet=True)
