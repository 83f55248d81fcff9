"""A trained policy as a kvpress press, for a transformers model in PyTorch.

This file needs torch, kvpress, transformers, numpy and safetensors only, neither JAX nor the rest of dcache: who has no JAX
copies it under another name (kvpress is the library's), with what `launch/export.py` wrote. See `docs/using_elsewhere.md`.

    from dcache_press import DistillCachePress
    press = DistillCachePress("exported", compression_ratio=0.75)
    with press(model):
        model.model(input_ids=prompt, past_key_values=cache)

The signals are those of `dcache/signals.py` right after a prefill, when slot t of every head holds token t. All layers'
statistics are taken before anything is decided, so the cache is evicted after the last layer. Its errors are ValueErrors.
DistillCache: Althoubi, arXiv 2608.08878.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kvpress import BasePress
from kvpress.utils import get_prerope_query_states
from safetensors.torch import load as load_tensors
from torch import Tensor
from transformers import QuantizedCache

VERSION = 2
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM")
_QUERY_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """What the signals read of one layer after the prefill; with a leading L on every field, all layers stacked.

    Attributes:
      mass: f32[B, N, S], sum over queries of the attention. last: of the last query. window: sum over the last queries.
      rows: f32[B, W, S], attention of the last W queries, mean over heads.
      value_norm: f32[B, K, S]. distinct: f32[B, K, S], minus the cosine of each key and the mean unit key of its head.
      reading: f32[B, K, S], what the policy reads from the hidden states; 0 if it reads nothing.
    """

    mass: Tensor
    last: Tensor
    window: Tensor
    rows: Tensor
    value_norm: Tensor
    distinct: Tensor
    reading: Tensor


class ExportedPolicy:
    """The two files of an exported policy: signals to scores.

    Args:
      path: folder with `policy.json` and `weights.safetensors`.

    Raises:
      ValueError: no such files, another format, or files that do not belong together.
    """

    def __init__(self, path: str | pathlib.Path):
        folder = pathlib.Path(path)
        try:
            description = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
            found = (description["format"], description["version"], description["method"])
            raw = (folder / description["weights"]["file"]).read_bytes()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} holds no exported policy ({error!r}); make one with launch/export.py."
            ) from error
        if found != ("dcache-policy", VERSION, "distillcache"):
            raise ValueError(
                f"{str(path)!r} holds {found}; this file reads ('dcache-policy', {VERSION}, 'distillcache')."
            )
        if hashlib.sha256(raw).hexdigest() != description["weights"]["sha256"]:
            raise ValueError(f"{str(path)!r} holds weights of another export than its policy.json; export it again.")
        self.granularity: str = description["granularity"]
        self.scope: str = description["scope"]
        self.cap: float = description["cap"]
        self.heads: tuple[int, ...] = tuple(description["heads"])
        self.signals: list[dict[str, Any]] = description["signals"]
        self.constants: dict[str, Any] = description["constants"]
        self._prior: list[float] = description["prior"]
        self._layer_reduce: str = description["layer_reduce"]
        self._network: dict[str, Any] = description["network"]
        self.reader: dict[str, Any] | None = description["reader"]
        self._weights: dict[str, Tensor] = load_tensors(raw)
        names = {signal["name"] for signal in self.signals}
        # Attention of all queries is taken only if a signal needs it.
        self.needs_mass = any(
            name.startswith(("alpha", "sigma")) and not name.startswith("alpha_last") for name in names
        )
        self.tail: int = max(self.constants["window"], self.constants["entropy_queries"])

    def features(self, statistics: LayerStatistics) -> Tensor:
        """Standardised signals, and the reading: f32[B, S, F], or f32[L, B, K, S, F] at granularity "head"."""
        layers, batch, heads, tokens = statistics.value_norm.shape
        columns = []
        for signal in self.signals:
            value = self._signal(signal["name"], statistics, signal["per"])
            if signal["log"]:
                value = torch.log(value.clamp(min=0.0) + self.constants["log_offset"])
            if signal["per"] == "sequence":
                value = standardised(value)
                if self.granularity == "head":
                    value = value[None, :, None].expand(layers, batch, heads, tokens)
            else:
                value = unpooled(standardised(pooled(value, self.scope)), self.scope, value.shape)
            columns.append(value)
        if self.reader:
            columns.append(statistics.reading)
        return torch.stack(columns, dim=-1)

    def reading(self, layer: int, hidden: Tensor) -> Tensor:
        """What a layer's network reads: hidden states [B, S, D] -> f32[B, K, S]."""
        assert self.reader is not None
        w = {
            name: self._weights[f"reader.{name}"][layer].to(hidden.device) for name in ("in", "in_bias", "out", "bias")
        }
        x = F.layer_norm(hidden.float(), hidden.shape[-1:], eps=self.reader["epsilon"])
        x = F.gelu(F.linear(x, w["in"], w["in_bias"]), approximate="tanh")
        return F.linear(x, w["out"], w["bias"]).transpose(1, 2)

    def scores(self, features: Tensor) -> Tensor:
        """Scores of features f32[..., S, F]: f32[..., S], higher = keep."""
        w = {name: tensor.to(features.device) for name, tensor in self._weights.items()}
        x = features
        if self.heads:
            code = w["heads.code"][:, None, :, None].expand(*features.shape[:-1], -1)
            x = torch.cat([features, code], dim=-1)
        for i in range(self._network["layers"]):
            x = F.linear(x, w[f"linear.{i}.weight"], w[f"linear.{i}.bias"])
            norm = w[f"norm.{i}.weight"], w[f"norm.{i}.bias"]
            x = F.relu(F.layer_norm(x, x.shape[-1:], *norm, self._network["layernorm_epsilon"]))
        score = F.linear(x, w["score.weight"], w["score.bias"])[..., 0]
        if self.heads:
            score = score + torch.einsum("lbksf,lkf->lbks", features, w["heads.slope"])
            score = score + w["heads.offset"][:, None, :, None]
        if self._prior:
            score = score + features @ torch.tensor(self._prior, device=features.device)
        return score

    def kept(self, scores: Tensor, count: int) -> Tensor:
        """bool of the shape of the scores: the best, `count` for each keep-set (on average, where heads share budgets)."""
        own = scores
        if self.cap:
            place = torch.sort(scores, dim=-1, descending=True, stable=True).indices.argsort(-1)
            own = scores.masked_fill(place >= int(self.cap * count + 1e-4), -torch.inf)
        shared = pooled(own, self.scope)
        order = torch.sort(shared, dim=-1, descending=True, stable=True).indices
        best = order[..., : count * (shared.shape[-1] // scores.shape[-1])]
        keep = torch.zeros_like(shared, dtype=torch.bool).scatter_(-1, best, True)
        return unpooled(keep, self.scope, scores.shape)

    def _signal(self, name: str, statistics: LayerStatistics, per: str) -> Tensor:
        """One raw signal: f32[B, S], or f32[L, B, K, S] per "head"."""
        if name.endswith("_near"):
            value = self._signal(name.removesuffix("_near"), statistics, per)
            near = self.constants["near"]
            flat = F.max_pool1d(value.reshape(-1, 1, value.shape[-1]), near, stride=1, padding=near // 2)
            return flat.reshape(value.shape)
        if name.endswith("_upper"):
            first = statistics.mass.shape[0] // 2
            parts = (getattr(statistics, field.name)[first:] for field in dataclasses.fields(statistics))
            return self._signal(name.removesuffix("_upper"), LayerStatistics(*parts), per)
        try:
            return _SIGNALS[name.removesuffix("_all")](self, statistics, per)
        except KeyError:
            raise ValueError(f"The exported policy reads the signal {name!r}, which this file does not know.") from None

    def _over_layers(self, x: Tensor) -> Tensor:
        return x.amax(0) if self._layer_reduce == "max" else x.mean(0)

    def _rate(self, statistics: LayerStatistics) -> Tensor:
        """Attention mass of each query head divided by the number of queries that could see the token."""
        tokens = statistics.mass.shape[-1]
        return statistics.mass / torch.arange(tokens, 0, -1, device=statistics.mass.device)

    def _sigma(self, statistics: LayerStatistics, per: str) -> Tensor:
        rate = self._rate(statistics)
        if per == "head":
            return grouped(rate, statistics).var(3, correction=0)
        return self._over_layers(rate.var(2, correction=0))

    def _vnorm(self, statistics: LayerStatistics, per: str) -> Tensor:
        return statistics.value_norm if per == "head" else self._over_layers(statistics.value_norm.mean(2))

    def _window(self, statistics: LayerStatistics) -> Tensor:
        return statistics.window / self.constants["window"]

    def _entropy(self, statistics: LayerStatistics, per: str) -> Tensor:
        del per
        rows = statistics.rows.mean(0)[:, -self.constants["entropy_queries"] :]
        entropy = -torch.xlogy(rows, rows).sum(-1)
        return torch.einsum("bws,bw->bs", rows, entropy) / rows.sum(1).clamp(min=1e-20)


def grouped(x: Tensor, statistics: LayerStatistics) -> Tensor:
    """[L, B, N, S] -> [L, B, K, G, S]."""
    return x.unflatten(2, (statistics.value_norm.shape[2], -1))


def _mean(x: Tensor, statistics: LayerStatistics, per: str) -> Tensor:
    return grouped(x, statistics).mean(3) if per == "head" else x.mean((0, 2))


def _highest(x: Tensor, statistics: LayerStatistics, per: str) -> Tensor:
    return grouped(x, statistics).amax(3) if per == "head" else x.amax((0, 2))


def _position(policy: ExportedPolicy, statistics: LayerStatistics, per: str) -> Tensor:
    shape = statistics.value_norm.shape
    value = torch.arange(shape[-1], device=statistics.value_norm.device) / shape[-1]
    return value.expand(shape if per == "head" else (shape[1], shape[3]))


def _distinct(policy: ExportedPolicy, statistics: LayerStatistics, per: str) -> Tensor:
    return statistics.distinct if per == "head" else statistics.distinct.mean((0, 2))


_SIGNALS: dict[str, Callable[[ExportedPolicy, LayerStatistics, str], Tensor]] = {
    "alpha": lambda policy, s, per: _mean(policy._rate(s), s, per),
    "alpha_last": lambda policy, s, per: _mean(s.last, s, per),
    "vnorm": ExportedPolicy._vnorm,
    "sigma": ExportedPolicy._sigma,
    "entropy": ExportedPolicy._entropy,
    "pos": _position,
    "window_mean": lambda policy, s, per: _mean(policy._window(s), s, per),
    "window_max": lambda policy, s, per: _highest(policy._window(s), s, per),
    "last": lambda policy, s, per: _mean(s.last, s, per),
    "last_max": lambda policy, s, per: _highest(s.last, s, per),
    "key_distinct": _distinct,
}


def pooled(x: Tensor, scope: str) -> Tensor:
    """What competes for one budget on the last axis: any shape -> itself, [L, B, K, S] -> [L, B, K * S] or [B, L * K * S]."""
    if scope == "head":
        return x
    return x.flatten(2) if scope == "layer" else x.transpose(0, 1).flatten(1)


def unpooled(x: Tensor, scope: str, shape: torch.Size) -> Tensor:
    """The inverse of `pooled`; shape: what it was given."""
    if scope == "model":
        layers, batch, heads, tokens = shape
        return x.reshape(batch, layers, heads, tokens).transpose(0, 1)
    return x.reshape(shape)


def standardised(x: Tensor) -> Tensor:
    """Zero mean and unit variance over the last axis; a constant becomes 0."""
    mean = x.mean(-1, keepdim=True)
    deviation = x.var(-1, correction=0, keepdim=True).sqrt()
    varies = deviation > 1e-6 * mean.abs().clamp(min=1e-6)
    return torch.where(varies, (x - mean) / deviation.clamp(min=1e-12), 0.0)


def layer_statistics(
    queries: Tensor, keys: Tensor, values: Tensor, policy: ExportedPolicy, scale: float, reading: Tensor | None = None
) -> LayerStatistics:
    """The statistics of one layer, whose causal attention is taken again, block of queries by block of queries.

    Args:
      queries: [B, N, S, H], rotated. keys, values: [B, K, S, H], keys rotated. reading: f32[B, K, S] or None.
    """
    batch, heads, tokens, width = queries.shape
    q = queries.float().unflatten(1, (keys.shape[1], -1))  # [B, K, G, S, H]
    k, unit = keys.float(), F.normalize(keys.float(), dim=-1)
    mass = torch.zeros(batch, heads, tokens, device=keys.device)
    tail = torch.zeros(batch, heads, 0, tokens, device=keys.device)
    first = 0 if policy.needs_mass else max(tokens - policy.tail, 0)
    for start in range(first, tokens, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, tokens)
        logits = torch.einsum("bkgth,bksh->bkgts", q[..., start:stop, :], k[:, :, :stop]) * scale
        hidden = torch.ones(stop - start, stop, dtype=torch.bool, device=keys.device).triu(start + 1)
        probs = F.pad(logits.masked_fill(hidden, -torch.inf).softmax(-1).flatten(1, 2), (0, tokens - stop))
        mass += probs.sum(2)
        tail = torch.cat([tail, probs], dim=2)[:, :, -policy.tail :]
    return LayerStatistics(
        mass=mass,
        last=tail[:, :, -1],
        window=tail[:, :, -policy.constants["window"] :].sum(2),
        rows=tail.mean(1),
        value_norm=values.float().norm(dim=-1),
        distinct=-torch.einsum("bksh,bkh->bks", unit, F.normalize(unit.sum(2), dim=-1)),
        reading=torch.zeros_like(keys[..., 0], dtype=torch.float32) if reading is None else reading,
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split. x [B, N, S, H]; cos, sin [B or 1, S, H]."""
    if cos.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"The model rotates {cos.shape[-1]} of {x.shape[-1]} dimensions; only full rotary embeddings are built."
        )
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@dataclasses.dataclass
class DistillCachePress(BasePress):
    """Evicts with an exported policy after the prefill, in all layers at once.

    Keep-sets of equal size are cut out of the cache. A policy whose heads share budgets keeps unequal numbers of tokens; those
    it drops stay in memory and are hidden from attention by kvpress (`masked_key_indices`), which eager attention cannot do.
    Prompts of a batch must have equal lengths: padding would be taken for text.

    Attributes:
      path: folder that `launch/export.py` wrote.
      compression_ratio: share of tokens to evict. As in dcache at least 32 tokens of each keep-set stay, or all if fewer.
      scores, kept: of the last prompt, in the shape [B, S] or [L, B, K, S].
    """

    path: str
    compression_ratio: float = 0.75
    scores: Tensor | None = dataclasses.field(default=None, init=False, repr=False)
    kept: Tensor | None = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self):
        if not 0.0 <= self.compression_ratio < 1.0:
            raise ValueError(f"compression_ratio is {self.compression_ratio}; give the share to evict, in [0, 1).")
        self._statistics: dict[int, LayerStatistics] = {}
        self._modules: dict[int, Any] = {}

    @functools.cached_property
    def policy(self) -> ExportedPolicy:
        """The exported policy."""
        return ExportedPolicy(self.path)

    def post_init_from_model(self, model: Any) -> None:
        """Refuses models that the policy does not fit."""
        name, config = type(model).__name__, model.config
        if name not in ARCHITECTURES:
            raise ValueError(f"The model is a {name}; this press was written for {', '.join(ARCHITECTURES)}.")
        shape = (config.num_hidden_layers, config.num_key_value_heads)
        if self.policy.heads and self.policy.heads != shape:
            raise ValueError(
                f"The policy has learned terms for {self.policy.heads[0]} layers of {self.policy.heads[1]} key/value heads; "
                f"the model has {shape[0]} of {shape[1]}. Train one for it, or use a policy without such terms."
            )
        if self.policy.reader and self.policy.reader["width"] != config.hidden_size:
            raise ValueError(
                f"The policy reads hidden states of width {self.policy.reader['width']}; the model's have {config.hidden_size}."
            )
        if self.policy.scope != "head" and config._attn_implementation == "eager":
            raise ValueError(
                "The policy's heads share budgets, and kvpress cannot hide tokens from eager attention; load the model with "
                "attn_implementation='sdpa'."
            )
        self._statistics, self._modules = {}, {}

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        """Takes a layer's statistics; after the last layer decides, and evicts in all."""
        del attentions  # only eager attention gives them, as one matrix of all queries by all keys
        cache, config, tokens = kwargs["past_key_values"], module.config, keys.shape[2]
        if isinstance(cache, QuantizedCache):
            raise ValueError("The cache is quantised, which this press does not support; use a DynamicCache.")
        sliding = getattr(config, "sliding_window", None)
        if sliding is not None and tokens > sliding:
            raise ValueError(
                f"The prompt has {tokens} tokens and the model's attention sees {sliding}; give at most as many."
            )
        queries = rotate(get_prerope_query_states(module, hidden_states), *kwargs["position_embeddings"])
        scale = 1.0 / math.sqrt(queries.shape[-1])
        with torch.no_grad():
            reading = self.policy.reading(module.layer_idx, hidden_states) if self.policy.reader else None
        self._statistics[module.layer_idx] = layer_statistics(queries, keys, values, self.policy, scale, reading)
        self._modules[module.layer_idx] = module
        if len(self._statistics) < config.num_hidden_layers:
            return keys, values
        self._decide(tokens)
        if self.policy.scope == "head":
            for i, layer in enumerate(cache.layers):
                layer.keys, layer.values = (cut(x, self._of_layer(i)) for x in (layer.keys, layer.values))
            keys, values = cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values
        else:
            for i, attention in self._modules.items():
                attention.masked_key_indices = torch.nonzero(~self._of_layer(i), as_tuple=True)
        self._statistics, self._modules = {}, {}
        return keys, values

    def _decide(self, tokens: int) -> None:
        layers = [self._statistics[i] for i in sorted(self._statistics)]
        device = layers[-1].mass.device
        names = [field.name for field in dataclasses.fields(LayerStatistics)]
        stacked = {name: torch.stack([getattr(layer, name).to(device) for layer in layers]) for name in names}
        with torch.no_grad():
            self.scores = self.policy.scores(self.policy.features(LayerStatistics(**stacked)))
        wanted = math.floor((1.0 - self.compression_ratio) * tokens + 1e-9)
        count = min(max(wanted, self.policy.constants["minimum_tokens"]), tokens)
        self.kept = self.policy.kept(self.scores, count)

    def _of_layer(self, i: int) -> Tensor:
        """bool[B, 1 or K, S], what a layer keeps, on its own device."""
        assert self.kept is not None
        keep = self.kept[:, None] if self.policy.granularity == "sequence" else self.kept[i]
        device = self._modules[i].o_proj.weight.device
        return keep.to(device)


def cut(x: Tensor, keep: Tensor) -> Tensor:
    """The kept tokens in order: [B, K, S, H], bool[B, 1 or K, S] with equally many true values -> [B, K, count, H]."""
    count = int(keep[0, 0].sum())
    index = torch.sort((~keep).to(torch.uint8), dim=-1, stable=True).indices[..., :count]
    return x.gather(2, index[..., None].expand(x.shape[0], x.shape[1], count, x.shape[3]))
