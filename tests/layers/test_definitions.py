"""Every method against its definition: plain loops in float64, written from the formula, a query and a head at a time.

Each `weights_*` function gives the weights of keys 0 .. i for query i of head h (or says otherwise); outputs and the
gradients of all parameters and of the input must agree.
"""

from __future__ import annotations

import math

import pytest
import torch

from traformer.layers import AttentionContext, layer_class
from traformer.methods import METHODS, resolve_method

E, HEADS, KEY_HEADS, D, LENGTH = 16, 4, 2, 8, 11


def build(name: str, qk_norm: bool = True, layer_idx: int = 0, heads: int = HEADS, **options):
    method = resolve_method(name, options)
    qk_norm = qk_norm if method.qk_norm is None else method.qk_norm
    torch.manual_seed(0)
    make = layer_class(name)
    layer = (
        make(E, heads, KEY_HEADS, head_dim=D, qk_norm=qk_norm, layer_idx=layer_idx, **method.options).double().eval()
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 0:
                parameter.copy_(torch.randn_like(parameter) * 0.6)
    return layer


def run(layer, x):
    context = AttentionContext()
    context.shared[layer.leader] = layer.prepare(context, x)
    return layer(x, context)[0]


def normed(vector):
    return vector / torch.sqrt((vector**2).mean() + 1e-6)


def rotated(vector, position, theta=500_000.0):
    """Channel e and channel e + half turn together by position / theta^(2e / width)."""
    half = len(vector) // 2
    result = [None] * (2 * half)
    for e in range(half):
        angle = position * theta ** (-2.0 * e / len(vector))
        a, b = vector[e], vector[e + half]
        result[e] = a * math.cos(angle) - b * math.sin(angle)
        result[e + half] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(result)


class Naive:
    """q, k and v of one sequence by the formula, and what a method needs of its parameters."""

    def __init__(self, layer, x):  # x [T, E]
        self.layer, self.x = layer, x
        groups = layer.num_heads // layer.num_key_heads

        def heads(weight, count):
            return [[weight[h * D : (h + 1) * D] @ token for token in x] for h in range(count)]

        q = heads(layer.q_proj.weight, layer.num_heads)
        k = heads(layer.k_proj.weight, layer.num_key_heads)
        v = heads(layer.v_proj.weight, layer.num_key_heads)
        if layer.qk_norm:
            q = [[normed(vector) for vector in head] for head in q]
            k = [[normed(vector) for vector in head] for head in k]
        self.q = q
        self.k = [k[h // groups] for h in range(layer.num_heads)]
        self.v = [v[h // groups] for h in range(layer.num_heads)]

    def score(self, h, i, j):
        return self.q[h][i] @ self.k[h][j] / math.sqrt(D)

    def output(self, weights):
        rows = []
        for i in range(len(self.x)):
            mixed = []
            for h in range(self.layer.num_heads):
                row = one_hot(i) if reads_previous(self.layer, h) else weights(self, h, i)
                mixed.append(sum((row[j] * self.v[h][j] for j in range(i + 1)), torch.zeros(D, dtype=torch.float64)))
            rows.append(self.after(mixed))
        return torch.stack(rows)

    def after(self, mixed):
        return self.layer.o_proj.weight @ torch.cat(mixed) + self.layer.o_proj.bias


def reads_previous(layer, h):
    """Whether the option gives the head the previous token alone."""
    option = layer.option.get("previous_heads", False)
    return option if isinstance(option, bool) else h < HEADS // 2 if option == "half" else option[h]


def one_hot(i):
    """Weights of query i on the token before it; none for the first."""
    return [torch.tensor(float(j == i - 1), dtype=torch.float64) for j in range(i + 1)]


def softmax(logits):
    """Over the entries that are not None; all None gives zeros."""
    values = [torch.exp(x) for x in logits if x is not None]
    total = sum(values)
    return [torch.zeros((), dtype=torch.float64) if x is None else torch.exp(x) / total for x in logits]


def slope(h, heads=HEADS):
    return 2.0 ** (-8.0 * (h + 1) / heads)


def sigmoid(z):
    return 1.0 / (1.0 + torch.exp(-z))


def gate(linear, x, h):
    return linear.weight[h] @ x + linear.bias[h]


def turned_score(n, h, i, j):
    return rotated(n.q[h][i], i) @ rotated(n.k[h][j], j) / math.sqrt(D)


def recipe(n, h):
    """What the shared options make of a head: the factor on its scores, and whether its own key is left out."""
    factor = 1.0 if n.layer.temperature is None else torch.exp(n.layer.temperature[h])
    return factor, n.layer.option["exclude_self"] == "half" and h < HEADS // 2


def softmax_of(n, h, i, score, bias=lambda j: 0.0):
    """Softmax of the scores times the head's temperature plus a bias, over the keys of the window that it may see."""
    factor, excluded = recipe(n, h)
    window = n.layer.option["sliding_window"] or i + 1
    sinks = n.layer.option.get("sinks", 0)
    seen = [(i - j < window or j < sinks) and not (excluded and j == i) for j in range(i + 1)]
    return softmax([factor * score(n, h, i, j) + bias(j) if seen[j] else None for j in range(i + 1)])


def weights_nope(n, h, i):
    return softmax_of(n, h, i, Naive.score)


def weights_rope(n, h, i):
    """A sink that has left the window is met as if the query were where the last of them left it."""
    window, sinks = n.layer.option["sliding_window"], n.layer.option.get("sinks", 0)

    def score(n, h, i, j):
        place = min(i, window + sinks - 1) if j < sinks else i
        return rotated(n.q[h][i], place) @ rotated(n.k[h][j], j) / math.sqrt(D)

    return softmax_of(n, h, i, score)


def weights_alibi(n, h, i):
    return softmax_of(n, h, i, Naive.score, lambda j: -slope(h) * (i - j))


def weights_t5(n, h, i):
    def bucket(distance):  # 32 buckets: 0 .. 15 exactly, then logarithmic up to 128
        if distance < 16:
            return distance
        return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))

    return softmax_of(n, h, i, Naive.score, lambda j: n.layer.bias_table[bucket(i - j)][h])


def weights_fire(n, h, i):
    layer = n.layer
    c, limit = layer.slope.abs(), (layer.length_factor * 512.0).abs()

    def bias(j):
        far = torch.log(c * torch.maximum(torch.tensor(float(i), dtype=torch.float64), limit) + 1) + 1e-6
        ratio = torch.log(c * (i - j) + 1) / far
        hidden = torch.relu(layer.bias_in.weight[:, 0] * ratio + layer.bias_in.bias)
        return layer.bias_out.weight[h] @ hidden

    return softmax_of(n, h, i, Naive.score, bias)


def weights_cope(n, h, i):
    table = n.layer.position_table

    def position_logit(j):
        p = sum(sigmoid(n.score(h, i, m)) for m in range(j, i + 1))
        p = torch.clamp(p, max=float(len(table) - 1))
        low, high = math.floor(p.item()), math.ceil(p.item())
        part = p - low
        return (1 - part) * (n.q[h][i] @ table[low]) + part * (n.q[h][i] @ table[high])

    return softmax([n.score(h, i, j) + position_logit(j) for j in range(i + 1)])


def weights_fot(n, h, i):
    forget = [torch.log(sigmoid(gate(n.layer.forget_proj, token, h))) for token in n.x]
    return softmax_of(n, h, i, Naive.score, lambda j: sum(forget[j + 1 : i + 1]))


def weights_stick_breaking(n, h, i):
    result, left = [torch.zeros((), dtype=torch.float64)] * (i + 1), torch.ones((), dtype=torch.float64)
    factor = 1.0 if n.layer.temperature is None else torch.exp(n.layer.temperature[h])
    for j in range(i - 1, max(-1, i - (n.layer.option["sliding_window"] or i + 1)), -1):  # nearest first, own key never
        share = sigmoid(factor * n.score(h, i, j))
        result[j] = share * left
        left = left * (1 - share)
    return result


def weights_selective(n, h, i):
    logits = []
    for j in range(i + 1):
        taken = sum(torch.relu(turned_score(n, 0, t, j)) for t in range(j + 1, i)) if j > 0 else 0.0
        logits.append(turned_score(n, h, i, j) - taken)
    return softmax(logits)


def weights_ssmax(n, h, i):
    factor = n.layer.log_scale[h] * math.log(i + 1)
    return softmax_of(n, h, i, lambda *where: factor * turned_score(*where))


def weights_asentmax(n, h, i):
    if h < HEADS // 2:
        logits = [n.score(h, i, j) - (i - j) / (h + 1) for j in range(i + 1)]
    else:
        row = h - HEADS // 2
        beta = torch.log(1 + torch.exp(n.layer.beta_proj.weight[row] @ n.x[i]))
        gamma = 2.0 * torch.tanh(n.layer.gamma_proj.weight[row] @ n.x[i])
        factor = 1.0 + beta * math.log(i + 2) ** gamma
        logits = [factor * n.score(h, i, j) for j in range(i + 1)]
    # 1.5-entmax, exactly: try every support size, largest logits first.
    halves = torch.stack(logits) / 2
    ranked = halves.sort(descending=True).values
    for size in range(len(ranked), 0, -1):
        top = ranked[:size]
        mean, spread = top.mean(), (top**2).mean() - top.mean() ** 2
        under = 1.0 / size - spread
        if under < 0:
            continue
        tau = mean - torch.sqrt(under)
        if tau < top[-1]:
            return list(torch.clamp(halves - tau, min=0.0) ** 2)
    raise AssertionError("no support found")


def weights_tra(n, h, i, threshold=0.0, decay=None):
    factor, excluded = recipe(n, h)
    log_decay = torch.log(sigmoid(gate(n.layer.decay_proj, n.x[i], h))) if decay is None else decay(h)
    logits, count = [None] * (i + 1), 0
    for j in range(i, -1, -1):
        s = factor * n.score(h, i, j)
        if s > threshold and not (excluded and j == i):
            count += 1
            logits[j] = s + log_decay * count
    return softmax(logits)


def weights_sharpening(n, h, i):
    """The n-th token's scores times n^p; its gates' start and all else as in TRA."""
    power = torch.tensor(float(i + 1), dtype=torch.float64) ** n.layer.sharpening[h]
    score = n.score
    n.score = lambda h, i, j: power * score(h, i, j)
    try:
        return weights_tra(n, h, i)
    finally:
        del n.score


def weights_distance_only(n, h, i):
    """All keys that the head may see are in the softmax; distance counts those that score above 0."""
    log_decay = torch.log(sigmoid(gate(n.layer.decay_proj, n.x[i], h)))
    factor, excluded = recipe(n, h)
    logits, count = [None] * (i + 1), 0
    for j in range(i - 1 if excluded else i, -1, -1):
        s = factor * n.score(h, i, j)
        count += int(s > 0)
        logits[j] = s + log_decay * count
    return softmax(logits)


def weights_kept(n, h, i, bias):
    logits = [n.score(h, i, j) for j in range(i + 1)]
    return softmax([s + bias(j) if s > 0 else None for j, s in enumerate(logits)])


def weights_kept_forgetting(n, h, i):
    forget = [torch.log(sigmoid(gate(n.layer.decay_proj, token, h))) for token in n.x]
    return weights_kept(n, h, i, lambda j: sum(forget[j + 1 : i + 1]))


def learned_threshold(n, h, i):
    return torch.log(1 + torch.exp(gate(n.layer.threshold_proj, n.x[i], h)))


DEFINITIONS = {
    "nope": weights_nope,
    "sinusoidal": weights_nope,  # what they add stands in the embeddings: see test_absolute_positions
    "learned": weights_nope,
    "rope": weights_rope,
    "alibi": weights_alibi,
    "t5": weights_t5,
    "fire": weights_fire,
    "cope": weights_cope,
    "fot": weights_fot,
    "stick_breaking": weights_stick_breaking,
    "selective": weights_selective,
    "ssmax": weights_ssmax,
    "asentmax": weights_asentmax,
    "tra": weights_tra,
    "tra_variant": weights_tra,
    "tra_threshold_only": lambda n, h, i: weights_tra(n, h, i, decay=lambda h: 0.0),
    "tra_fixed_decay": lambda n, h, i: weights_tra(n, h, i, decay=lambda h: -slope(h)),
    "tra_distance_only": weights_distance_only,
    "tra_ordinary_distance": lambda n, h, i: weights_kept(n, h, i, lambda j: -slope(h) * (i - j)),
    "tra_forget_distance": weights_kept_forgetting,
    "tra_no_qk_norm": weights_tra,
    "tra_threshold_half": lambda n, h, i: weights_tra(n, h, i, threshold=0.5),
    "tra_exclude_self": weights_tra,
    "tra_temperature": weights_tra,
    "tra_exclude_self_temperature": weights_tra,
    "tra_growing_threshold": lambda n, h, i: weights_tra(n, h, i, threshold=0.25 * math.sqrt(2 * math.log(i + 1))),
    "tra_margin": lambda n, h, i: weights_tra(n, h, i, threshold=0.25),
    "tra_sharpening": weights_sharpening,
    "tra_slow_gate": weights_tra,
    "tra_fast_gate": weights_tra,
    "sinusoidal_offset": weights_nope,
    "learned_offset": weights_nope,
    "rope_no_qk_norm": weights_rope,
    "rope_window": weights_rope,
    "previous_token": weights_nope,
    "rope_equal": weights_rope,
    "alibi_equal": weights_alibi,
    "fot_equal": weights_fot,
    "fot_far": weights_fot,
    "fot_previous": weights_fot,
    "stick_breaking_equal": weights_stick_breaking,
    "tra_plus_no_removal": weights_distance_only,
    "tra_plus_no_surrogate": weights_tra,
}
STRAIGHT_THROUGH = (
    "tra_learned_threshold", "tra_straight_through", "tra_plus", "tra_plus_own_key", "tra_plus_one_gate",
    "tra_plus_no_temperature", "tra_far", "tra_previous",
)  # fmt: skip
OTHERWISE = {"differential", "lstm", *STRAIGHT_THROUGH}  # pinned below


def test_nothing_is_left_out():
    assert set(DEFINITIONS) | OTHERWISE == set(METHODS)


def compare(layer, expected_of):
    x = torch.randn(1, LENGTH, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grad = torch.randn(LENGTH, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parameters = [x, *(p for name, p in layer.named_parameters() if "position_table.weight" not in name)]

    def gradients(out):
        return torch.autograd.grad((out * grad).sum(), parameters, allow_unused=True)

    out = run(layer, x)[0]
    expected = expected_of(x[0])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    for a, b in zip(gradients(out), gradients(expected), strict=True):
        a, b = (torch.zeros((), dtype=torch.float64) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b.expand_as(a), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_definition(name, qk_norm):
    layer = build(name, qk_norm)
    compare(layer, lambda x: Naive(layer, x).output(DEFINITIONS[name]))


@pytest.mark.parametrize("start", [-0.3, 0.4])
def test_sharpening_in_every_variant(start):
    """Negative and positive powers, together with a temperature, where keys are removed and where none is."""
    for options in ({}, {"temperature": True, "exclude_self": "half"}):
        layer = build("tra_variant", sharpening=start, **options)
        compare(layer, lambda x, layer=layer: Naive(layer, x).output(weights_sharpening))


def test_sharpening_starts_without_effect_and_counts_the_tokens_of_its_own_sequence():
    """Packed sequences count anew, padded places do not count, and the early exit's bound covers the factor."""
    layer = build("tra_sharpening").float()
    with torch.no_grad():
        layer.sharpening.zero_()
    x = torch.randn(1, 24, E)
    plain = build("tra").float()
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), plain(x))
    with torch.no_grad():
        layer.sharpening.copy_(torch.linspace(-0.5, 1.5, HEADS))
    apart = torch.cat([layer(x[:, :9]), layer(x[:, 9:])], dim=1)
    torch.testing.assert_close(layer(x, cu_seqlens=torch.tensor([0, 9, 24])), apart)
    real = torch.arange(24)[None] >= 9
    torch.testing.assert_close(layer(x, key_padding_mask=real)[:, 9:], layer(x[:, 9:]))
    scores = layer.score_bound(torch.float32, 24)
    assert (scores >= math.sqrt(D) * 24 ** torch.linspace(-0.5, 1.5, HEADS).clamp(min=0)).all()


SOFTMAX = [name for name, method in METHODS.items() if "sliding_window" in method.option_table and name in DEFINITIONS]


@pytest.mark.parametrize("name", [name for name in SOFTMAX if not METHODS[name].is_configuration])
@pytest.mark.parametrize("window", [1, 3])
def test_sliding_window(name, window):
    """Far fewer keys than there are tokens; with the recipe's other parts where the method has them."""
    recipe_options = {"exclude_self": "half", "temperature": True}
    extra = {x: recipe_options[x] for x in recipe_options if x in METHODS[name].option_table}
    for options in ({}, extra):
        layer = build(name, sliding_window=window, **options)
        compare(layer, lambda x, layer=layer: Naive(layer, x).output(DEFINITIONS[name]))


@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize("sinks", [1, 4])
def test_sinks_stay_in_sight_of_a_window(sinks, block, monkeypatch):
    """Blocks of queries that hold the first keys, some of them, or none; with and without the query's own key."""
    monkeypatch.setattr("traformer.ops.sliding_window.QUERY_BLOCK", block)
    for options in ({}, {"exclude_self": "half", "temperature": True}):
        layer = build("rope", sliding_window=2, sinks=sinks, **options)
        compare(layer, lambda x, layer=layer: Naive(layer, x).output(DEFINITIONS["rope"]))


@pytest.mark.parametrize("exclude_self", [True, [False, True, True, False]])
@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "fot"])
def test_heads_that_do_not_see_their_own_key(name, exclude_self, monkeypatch):
    layer = build(name, exclude_self=exclude_self)
    left_out = [True] * HEADS if exclude_self is True else exclude_self
    monkeypatch.setitem(globals(), "recipe", lambda n, h: (1.0, left_out[h]))
    compare(layer, lambda x: Naive(layer, x).output(DEFINITIONS[name]))


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("tra", "rope", "nope", "alibi", "t5", "fire", "ssmax")),
        ("tra", {"temperature": True, "exclude_self": [False, True, False, True]}),
        ("tra_variant", {"removal": False, "temperature": True}),
        ("tra_variant", {"distance": "forgetting"}),
        ("nope", {"sliding_window": 1}),
        ("fot", {"sliding_window": 3, "exclude_self": True}),
    ],
)
def test_heads_that_read_the_previous_token(name, options, qk_norm):
    """Exactly, whatever scores it has and whatever else the layer does."""
    definition = DEFINITIONS[name]
    if options.get("removal") is False:
        definition = weights_distance_only
    elif options.get("distance") == "forgetting":
        definition = weights_kept_forgetting
    exclude_self = options.get("exclude_self", False)
    left_out = [exclude_self] * HEADS if isinstance(exclude_self, bool) else exclude_self

    def recipe_of(n, h):
        return 1.0 if n.layer.temperature is None else torch.exp(n.layer.temperature[h]), left_out[h]

    for previous in ("half", [False, True, False, True], True):
        layer = build(name, qk_norm, previous_heads=previous, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "recipe", recipe_of)
            compare(layer, lambda x, layer=layer: Naive(layer, x).output(definition))


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tra", {"temperature": True}),
        ("tra_variant", {"margin": 9.0}),
        ("tra_variant", {"distance": "forgetting"}),
        ("tra_variant", {"distance": "ordinary", "learned_threshold": True}),
    ],
)
def test_heads_that_read_the_previous_token_do_so_below_the_threshold(name, options, qk_norm):
    layer = build(name, qk_norm, previous_heads=True, threshold=50.0, **options)
    other = build(name, qk_norm, previous_heads=True)
    other.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, LENGTH, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x), other(x))
    assert not torch.allclose(layer(x)[:, 1:], layer.o_proj.bias)  # what a head that keeps nothing leaves


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "name", ["rope_equal", "alibi_equal", "fot_equal", "fot_previous", "t5", "stick_breaking_equal"]
)
def test_maps_show_what_a_head_sees(name, window):
    layer = build(name, sliding_window=window)
    x = torch.randn(1, LENGTH, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    context = AttentionContext(output_attentions=True)
    context.shared[layer.leader] = layer.prepare(context, x)
    found, naive = layer(x, context)[1][0], Naive(layer, x[0])
    definition = DEFINITIONS[METHODS[name].attention]
    for h in range(HEADS):
        for i in range(LENGTH):
            expected = torch.stack(one_hot(i) if reads_previous(layer, h) else definition(naive, h, i))
            torch.testing.assert_close(found[h, i, : i + 1], expected, rtol=1e-6, atol=1e-7)
            assert found[h, i, i + 1 :].eq(0).all()


@pytest.mark.parametrize("layer_idx", [0, 3])
def test_differential(layer_idx):
    layer = build("differential", layer_idx=layer_idx)
    start = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
    half = D // 2

    def expected(x):
        n = Naive(layer, x)
        a1, b1, a2, b2 = layer.factor_vectors
        factor = torch.exp(a1 @ b1) - torch.exp(a2 @ b2) + start

        def part(h, i, cut):
            turned = [rotated(n.q[h][i][cut], i) @ rotated(n.k[h][j][cut], j) / math.sqrt(half) for j in range(i + 1)]
            return softmax(turned)

        def weights(n, h, i):
            first, second = part(h, i, slice(0, half)), part(h, i, slice(half, D))
            return [a - factor * b for a, b in zip(first, second, strict=True)]

        def after(mixed):
            heads = [m / torch.sqrt((m**2).mean() + 1e-5) * layer.head_norm.weight * (1 - start) for m in mixed]
            return layer.o_proj.weight @ torch.cat(heads) + layer.o_proj.bias

        n.after = after
        return n.output(weights)

    compare(layer, expected)


def test_lstm():
    layer = build("lstm")

    def expected(x):
        width = layer.width
        h, c, rows = torch.zeros(width).double(), torch.zeros(width).double(), []
        for token in x:
            gates = layer.from_input @ token + layer.input_bias + layer.from_state @ h + layer.state_bias
            i, f, g, o = (gates[part * width : (part + 1) * width] for part in range(4))
            c = sigmoid(f) * c + sigmoid(i) * torch.tanh(g)
            h = sigmoid(o) * torch.tanh(c)
            rows.append(layer.o_proj.weight @ h + layer.o_proj.bias)
        return torch.stack(rows)

    compare(layer, expected)
    count = sum(p.numel() for p in layer.parameters())
    attention = 4 * E * HEADS * D + E
    assert 0.9 * attention < count <= attention


def threshold_of(n, h, i):
    return learned_threshold(n, h, i) if n.layer.threshold_proj is not None else 0.0


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_straight_through_keeps_what_exceeds_the_threshold(name):
    layer = build(name)
    x = torch.randn(1, LENGTH, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def weights(n, h, i):
        return weights_tra(n, h, i, threshold=threshold_of(n, h, i))

    expected = Naive(layer, x[0]).output(weights)
    torch.testing.assert_close(run(layer, x)[0], expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(run(layer, x)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_straight_through_gradient(name):
    """The gradient is that of the same softmax with a soft keep factor beside the hard one."""
    layer = build(name)
    x = torch.randn(1, LENGTH, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def soft(n, h, i):
        limit, (factor, excluded) = threshold_of(n, h, i), recipe(n, h)
        log_decay = torch.log(sigmoid(gate(layer.decay_proj, n.x[i], h)))
        seen = range(i if excluded else i + 1)
        scores = [factor * n.score(h, i, j) for j in seen]
        kept = [int(s > limit) for s in scores]
        none = torch.zeros((), dtype=torch.float64)
        if not any(kept):
            return [none] * (i + 1)
        counts = [1 + sum(kept[j + 1 :]) for j in seen]  # its distance, if it is kept
        factors = [sigmoid((s - limit) / 0.5) for s in scores]
        factors = [hard + s - s.detach() for hard, s in zip(kept, factors, strict=True)]
        mass = [f * torch.exp(s + log_decay * c) for f, s, c in zip(factors, scores, counts, strict=True)]
        total = sum(mass)
        return [m / total for m in mass] + [none] * excluded

    parameters = dict(layer.named_parameters())
    grads = []
    for out in (run(layer, x)[0], Naive(layer, x[0]).output(soft)):
        grads.append(torch.autograd.grad(out.square().sum(), list(parameters.values())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        assert a.abs().max() > 0
    if name == "tra_straight_through":  # and it is another gradient than TRA's own
        own = torch.autograd.grad(Naive(layer, x[0]).output(weights_tra).square().sum(), parameters["q_proj.weight"])[0]
        found = grads[0][list(parameters).index("q_proj.weight")]
        assert (own - found).abs().max() > 1e-3 * own.abs().max()


def test_margin_draws_the_threshold_in_training_only():
    layer = build("tra_margin")
    x, context = torch.randn(2, 50, E, dtype=torch.float64), AttentionContext()
    assert layer.thresholds(x, context).eq(0.25).all()
    drawn = layer.train().thresholds(x, context)
    assert drawn.min() >= 0 and drawn.max() <= 0.5 and drawn.std() > 0.1


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_absolute_positions(name):
    layer = build(name)
    x = torch.randn(2, 5, E, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    added = layer.embed(x, AttentionContext(position_ids=positions)) - x
    for row in range(2):
        for t in range(5):
            p = positions[row, t].item()
            if name == "learned":
                expected = layer.position_table.weight[p]
            else:
                angles = [p / 10_000 ** (2 * (e // 2) / E) for e in range(E)]
                waves = [math.sin(a) if e % 2 == 0 else math.cos(a) for e, a in enumerate(angles)]
                expected = torch.tensor(waves, dtype=torch.float64) * math.sqrt(2 / 3) * 0.01
            torch.testing.assert_close(added[row, t], expected)


@pytest.mark.parametrize("name", ["sinusoidal_offset", "learned_offset"])
def test_random_offsets_shift_whole_sequences_in_training_only(name):
    layer = build(name)
    x = torch.zeros(4, 6, E, dtype=torch.float64)
    assert torch.equal(layer.embed(x, AttentionContext())[0], layer.embed(x, AttentionContext())[3])
    layer.train()
    torch.manual_seed(0)
    drawn = layer.embed(x, AttentionContext())
    layer.eval()
    offsets = []
    for row in drawn:
        found = [
            o for o in range(1025)
            if torch.equal(layer.embed(x[:1], AttentionContext(position_ids=torch.arange(6)[None] + o))[0], row)
        ]  # fmt: skip
        assert len(found) == 1
        offsets += found
    assert len(set(offsets)) > 1
    layer.train()
    packed = layer.embed(x.view(1, 24, E), AttentionContext(cu_seqlens=torch.tensor([0, 24], dtype=torch.int32)))
    steps = packed[0, 1:] - packed[0, :-1]
    assert steps.abs().sum(-1).gt(0).all()  # one offset for the sequence: neighbours differ


def test_odd_numbers_of_heads_have_slopes():
    from traformer.ops.alibi import alibi_slopes

    assert alibi_slopes(1) == [2**-8.0]
    assert alibi_slopes(6) == [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0]
