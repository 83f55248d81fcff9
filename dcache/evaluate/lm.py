"""dcache as a model of lm-evaluation-harness (0.4.13): every task of the harness runs with any policy and budget.

    lm_eval.simple_evaluate(model=DCacheLM("smollm2", policy="snapkv", budget=0.25), tasks=["gsm8k_cot"], limit=20)

For many methods at once `dcache.evaluate.benchmark` is faster: there all of them share one reading of each prompt.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from dcache.api import resolve
from dcache.errors import ConfigError
from dcache.evaluate import shared
from dcache.evaluate.fidelity import Arm, make_arms
from dcache.generate import generate
from dcache.load import LanguageModel, load
from dcache.tasks import WITHHELD
from dcache.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], int]:
    """A prompt's tokens, and how many at its end are withheld from the policy (see `dcache.tasks.WITHHELD`)."""
    seen, _, hidden = text.partition(WITHHELD)
    tokens = tokenizer.encode(seen).tolist()
    if tokenizer.adds_bos and tokens[:1] != [tokenizer.bos_id]:
        tokens.insert(0, tokenizer.bos_id)
    more = tokenizer.encode(hidden).tolist()
    return tokens + more, len(more)


def fit(tokens: Sequence[int], room: int) -> tuple[list[int], bool]:
    """The last `room` tokens, as the harness cuts what is too long, and whether anything was cut."""
    return list(tokens[-room:]), len(tokens) > room


def by_context(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int
) -> Iterator[tuple[list[int], list[int], bool]]:
    """Texts to be scored after contexts, (context, text) each, grouped so that a context which several share is read once.

    Yields for each context the places of its pairs, the context's end that fits before their texts into `longest` tokens, and
    whether anything was cut.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(pairs):
        groups.setdefault(tuple(context), []).append(i)
    for context, members in groups.items():
        yield members, *fit(context, longest - max(len(pairs[i][1]) for i in members))


def chat_text(tokenizer: Tokenizer, history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The harness's conversations in the model's template; without a generation prompt the last message is gone on with."""
    return tokenizer.render(history, open_answer=not add_generation_prompt)


def stops(arguments: dict[str, Any]) -> list[str]:
    """The texts that end an answer, from the harness's generation arguments."""
    until = arguments.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def longest_answer(arguments: dict[str, Any], default: int) -> int:
    """The longest answer in tokens, from the harness's generation arguments.

    Raises:
      ConfigError: a request for anything but greedy answers.
    """
    if (
        arguments.get("do_sample")
        or float(arguments.get("temperature") or 0.0) > 0
        and arguments.get("do_sample", True)
    ):
        raise ConfigError(
            f"The task asks for sampled answers ({arguments}); benchmarks are run greedily: set do_sample to false."
        )
    return int(arguments.get("max_gen_toks") or arguments.get("max_new_tokens") or default)


@register_model("dcache")
class DCacheLM(TemplateLM):
    """One policy under one budget.

    Args:
      pretrained: what `dcache.load` takes, or a loaded model. policy, budget: see `dcache.generate`.
      dtype: of a model that is loaded here. batch_size: prompts that are answered together. max_length: longest prompt and
        answer in tokens (default: the model's context). max_gen_toks: longest answer of tasks that do not say.
      evict_every: tokens between evictions while an answer is written, 0 for none after the prefill. prefill_chunk: tokens of a
        longer prompt that are read at once, with an eviction after each chunk, 0 to read it whole.
    """

    def __init__(
        self, pretrained: str | LanguageModel = "smollm2", policy: Any = "full", budget: float | int = 1.0,
        dtype: str = "float32", batch_size: int = 8, max_length: int | None = None, max_gen_toks: int = 256,
        evict_every: int = 0, prefill_chunk: int = 0, seed: int = 0, device: Any = None,
    ):  # fmt: skip
        del device  # JAX chooses
        super().__init__()
        self.lm = load(pretrained, dtype) if isinstance(pretrained, str) else pretrained
        self.trained, self.budget, self.evict_every, self.seed = resolve(policy), budget, evict_every, seed
        self.prefill_chunk = prefill_chunk
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks
        self.max_length = max_length or self.lm.config.max_positions
        self.cut = 0  # prompts that were cut on the left

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.lm.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self.lm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return self.lm.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See `chat_text`."""
        return chat_text(self.lm.tokenizer, chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """What the harness records of the template: how it renders one word."""
        return chat_text(self.lm.tokenizer, [{"role": "user", "content": "word"}]) if chat_template else None

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text, with the BOS token where the tokenizer begins texts with it."""
        if add_special_tokens is False:
            return self.lm.tokenizer.encode(string).tolist()
        return encode(self.lm.tokenizer, string)[0]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, `batch_size` prompts of similar length at a time. A prompt with a withheld end is answered alone."""
        work = []
        for i, request in enumerate(requests):
            text, arguments = request.args
            new = longest_answer(arguments, self.max_gen_toks)
            tokens, withheld = encode(self.lm.tokenizer, text)
            tokens = self._fit(tokens, new)
            work.append((i, tokens, withheld, new, tuple(stops(arguments))))
        found: dict[int, str] = {}
        # Those that share a way to be answered, long ones first: the first batch needs the most memory.
        work.sort(key=lambda item: (item[2] > 0, item[3], item[4], -len(item[1])))
        with tqdm(total=len(work), disable=disable_tqdm, desc="answering", unit="prompt") as bar:
            while work:
                _, _, withheld, new, stop = work[0]
                size = 1 if withheld else self.batch_size
                batch = [item for item in work[:size] if item[2:] == (withheld, new, stop)]
                work = work[len(batch) :]
                for (i, *_), text in zip(batch, self._answer(batch, withheld, new, stop), strict=True):
                    found[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                bar.update(len(batch))
        self._report_cut()
        return [found[i] for i in range(len(requests))]

    def _answer(self, batch: list, withheld: int, new: int, stop: tuple[str, ...]) -> list[str]:
        prompts = [np.asarray(tokens, np.int32) for _, tokens, *_ in batch]
        if withheld:
            arms = self._arms(len(prompts[0]) - withheld)
            return [
                shared.answers(
                    self.lm, prompts[0], arms, new_tokens=new, stop=stop, withheld=withheld, prefill_chunk=self.prefill_chunk,
                    seed=self.seed,
                )[-1].text
            ]  # fmt: skip
        made = generate(
            self.lm, prompts, self.trained, self.budget, max_new_tokens=new, temperature=0.0, top_p=1.0, seed=self.seed,
            evict_every=self.evict_every, stop=stop, prefill_chunk=self.prefill_chunk,
        )  # fmt: skip
        return list(made.texts)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Texts after contexts; a context that several texts share is read once."""
        # A context of one token or none gets something to stand before it.
        pairs = [([self.prefix_token_id, *c] if len(c) < 2 else c, text) for _, c, text in requests]
        self._check_room(max(len(text) for _, text in pairs))
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="scoring", unit="text") as bar:
            for members, prompt, was_cut in by_context(pairs, self.max_length):
                self.cut += was_cut
                results = shared.scores(
                    self.lm, prompt, [pairs[i][1] for i in members], self._arms(len(prompt) - 1),
                    evict_every=self.evict_every, prefill_chunk=self.prefill_chunk, seed=self.seed,
                )  # fmt: skip
                for i, result in zip(members, results, strict=True):
                    found[i] = (result[-1].nats, result[-1].greedy)
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                bar.update(len(members))
        self._report_cut()
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: each window's first half is read, then evicted, and the second half scored under it.

        Every token is predicted once; those of a first half by the full cache, which no policy changes.
        """
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="scoring", unit="text"):
            (text,) = request.args
            total = 0.0
            for first, second in halves(self.lm, text, self.prefix_token_id, self.max_length):
                before, scored = shared.window(
                    self.lm, first, second, self._arms(len(first) - 1), evict_every=self.evict_every, seed=self.seed
                )
                total += before + (scored[-1].nats if scored else 0.0)
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return found

    def _arms(self, shortest: int) -> list[Arm]:
        """The full cache and, last, this model's own arm."""
        if self.trained.policy.name == "full":
            return make_arms({}, [1.0], shortest)
        return make_arms({self.trained.policy.name: self.trained}, [self.budget], shortest)

    def _fit(self, tokens: Sequence[int], more: int) -> list[int]:
        self._check_room(more)
        kept, was_cut = fit(tokens, self.max_length - more)
        self.cut += was_cut
        return kept

    def _check_room(self, more: int) -> None:
        if more >= self.max_length:
            raise ConfigError(
                f"An answer of {more} tokens leaves no room in a context of {self.max_length}; ask for a shorter one."
            )

    def _report_cut(self) -> None:
        if self.cut:
            _LOG.warning(
                "%d prompts were longer than the context and lost their beginning (left truncation).", self.cut
            )
            self.cut = 0


def halves(lm: LanguageModel, text: str, prefix: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """A text's windows of at most `longest` tokens, each as the half that is read first (after the prefix) and the other."""
    tokens = lm.tokenizer.encode(text).tolist()
    if not tokens:
        raise ConfigError("A text for perplexity is empty; leave it out.")
    windows = [tokens[i : i + longest - 1] for i in range(0, len(tokens), longest - 1)]
    return [([prefix, *window[: -(-len(window) // 2)]], window[-(-len(window) // 2) :]) for window in windows]
