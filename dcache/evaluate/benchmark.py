"""Benchmarks: tasks of lm-evaluation-harness with many policies and budgets, one reading of each prompt for all of them.

Task files, prompts, answers' filters and metrics are the harness's; what is new is who answers: all arms at once
(`dcache.evaluate.shared`). Results are written example by example, so that a stopped run goes on where it was.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from dcache import tasks as task_files
from dcache.data.local import localise
from dcache.errors import ConfigError, DcacheError
from dcache.evaluate import lm as model_class
from dcache.evaluate import records, shared, statistics
from dcache.evaluate.fidelity import Arm, budget_name
from dcache.experiment import Experiment
from dcache.load import LanguageModel
from dcache.sharding import on_its_mesh

_LOG = logging.getLogger(__name__)

Record = records.Record

DEFAULT_ANSWER = 256
"""Longest answer in tokens of tasks that do not say."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How benchmarks are run.

    Attributes:
      tasks: names of tasks, groups or tags, of the harness or of this project (`dcache_...`).
      count: the first so many items of each task; None for all.
      data_dir: folder with the benchmarks' files; None for the hub.
      length: longest prompt of the tasks that cut theirs (LongBench), and of perplexity texts without a length of their own.
      ruler_lengths: lengths of RULER's prompts. chat: put the harness's own tasks into the chat template (this project's say so
        themselves). most_new: longest answer, where a task asks for more; None for what the task says.
      long_count: the first so many items of tasks with answers of more than 64 tokens; None for `count`.
      evict_every, seed: as in `fidelity.Settings`.
    """

    tasks: tuple[str, ...]
    count: int | None = None
    data_dir: str | None = None
    length: int | None = None
    ruler_lengths: tuple[int, ...] = (4096,)
    chat: bool = False
    most_new: int | None = None
    long_count: int | None = None
    evict_every: int = 0
    seed: int = 0

    def __post_init__(self):
        if not self.tasks:
            raise ConfigError("There are no tasks; give names, such as tasks='gsm8k_cot,boolq'.")
        for name in ("count", "length", "most_new", "long_count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give a number from 1, or none.")


PROMPTS = "prompts.jsonl"
"""The file of prompts beside a results file."""

ANSWER_ROOM = 512
"""Tokens left for the answer where prompts are cut to the model's context."""


def settings_of(experiment: Experiment, lm: LanguageModel) -> Settings:
    """The benchmark settings of an experiment."""
    chosen = experiment.eval
    return Settings(
        tasks=chosen.task_names(), count=chosen.prompts, data_dir=chosen.data_dir,
        length=chosen.length or lm.config.max_positions - ANSWER_ROOM, ruler_lengths=chosen.ruler_lengths, chat=chosen.chat,
        most_new=chosen.most_new, long_count=chosen.long_count, evict_every=chosen.evict_every, seed=experiment.seed,
    )  # fmt: skip


def load_tasks(settings: Settings, lm: LanguageModel) -> dict[str, Any]:
    """The harness's task objects by name, data loaded.

    Raises:
      ConfigError: an unknown task, with names that resemble it. LoadError: data is missing or malformed.
    """
    metadata: dict[str, Any] = {"tokenizer": lm.tokenizer, "data_dir": settings.data_dir, "seed": settings.seed + 42}
    metadata |= {"max_seq_lengths": list(settings.ruler_lengths)}
    if settings.count is not None:
        metadata["count"] = settings.count
    if settings.length is not None:
        metadata["length"] = settings.length
    manager = _manager()
    found: dict[str, Any] = {}
    for name in settings.tasks:
        for leaf in _leaves(manager, name):
            config = _config(manager.task_index[leaf])
            config |= _overrides(config, settings.data_dir)
            config["metadata"] = {**(config.get("metadata") or {}), **metadata}
            try:
                loaded = manager.load([config])
            except DcacheError:
                raise
            except Exception as error:  # `datasets` and the harness raise many kinds.
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise ConfigError(
                    f"The task {leaf!r} cannot be loaded ({type(error).__name__}: {reason}); give its files with data_dir, or "
                    "run where the hub can be reached."
                ) from error
            found |= loaded["tasks"]
    return found


def _leaves(manager: TaskManager, name: str) -> list[str]:
    """The tasks of a name: itself, or the members of a group or tag."""
    if name not in manager.task_index:
        near = [known for known in manager.all_tasks if name.lower() in known.lower() or known.lower() in name.lower()]
        raise ConfigError(
            f"There is no task {name!r}; similar names: {', '.join(near[:8]) or 'none'} (`lm_eval ls tasks` lists all)."
        )
    entry = manager.task_index[name]
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    if entry.kind.name != "GROUP":
        return [name]
    config = _config(entry)
    members = [
        member if isinstance(member, str) else member.get("task", member.get("group")) for member in config["task"]
    ]
    return [leaf for member in members for leaf in _leaves(manager, member)]


def _config(entry: Any) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    return dict(load_yaml(entry.yaml_path, resolve_func=True)) if entry.yaml_path else dict(entry.cfg or {})


def _overrides(config: Mapping[str, Any], data_dir: str | None) -> dict[str, Any]:
    return {} if data_dir is None else localise(config, data_dir)


@functools.cache
def _manager() -> TaskManager:
    """The harness's index of all tasks and this project's; it takes seconds to make."""
    return TaskManager(include_path=task_files.PATH)


def describe(
    lm: LanguageModel, settings: Settings, examples: Sequence["_Example"], arms: Sequence[Arm]
) -> Record:  # fmt: skip
    """Everything that results depend on, JSON-ready: the first line of the results file."""
    plain = dataclasses.asdict(settings)
    del plain["data_dir"]  # a place, not a setting: what lies there is in the digest
    return {
        "model": lm.name,
        "architecture": dataclasses.asdict(lm.config),
        "settings": plain,
        "tasks": sorted({example.task_name for example in examples}),
        "requests_digest": records.digest(
            part for e in examples for part in (e.name, *(repr(request.args) for request in e.requests))
        ),
        "arms": records.describe_arms(arms),
    }


@on_its_mesh
def run(
    lm: LanguageModel, settings: Settings, arms: Sequence[Arm], path: pathlib.Path
) -> tuple[Record, list[Record]]:  # fmt: skip
    """Runs what a results file does not hold yet; writes one line an example. See the README, "Benchmarks", for the format.

    The prompts of all answers go to `PROMPTS` beside the results, for other software to answer (benchmarks/peers).

    Args:
      arms: of `fidelity.make_arms`, the full cache first.

    Raises:
      ConfigError: unknown tasks, or a file of another evaluation. LoadError: data is missing or malformed.
    """
    tasks = load_tasks(settings, lm)
    examples = [example for name, task in tasks.items() for example in examples_of(lm, name, task, settings)]
    header = describe(lm, settings, examples, arms)
    found = records.read(path) if path.exists() else None
    if found is not None:
        records.check_header(path, found[0], header)
    done = {record["name"]: record for record in found[1]} if found else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(PROMPTS), "w", encoding="utf-8") as file:
        for prompt in filter(None, (prompt_of(lm, example, settings) for example in examples)):
            records.write_line(file, dataclasses.asdict(prompt))
    skipped: collections.Counter[str] = collections.Counter()
    with open(path, "a" if found else "w", encoding="utf-8") as file:
        if not found:
            records.write_line(file, header)
        with tqdm(total=len(examples), desc="evaluating", unit="example", smoothing=0.1) as bar:
            for example in examples:
                if example.name not in done:
                    record = _evaluate(lm, example, settings, arms)
                    if "skipped" in record:
                        skipped[f"{example.task_name}: {record['skipped']}"] += 1
                    records.write_line(file, record)
                    done[example.name] = record
                bar.update()
    for reason, times in skipped.items():
        _LOG.warning("%d examples skipped: %s", times, reason)
    return header, [done[example.name] for example in examples]


@dataclasses.dataclass(frozen=True)
class _Example:
    """One item of a task: its requests (more than one for multiple choice) and its name in the results."""

    name: str
    task_name: str
    task: Any
    doc: Mapping[str, Any]
    requests: tuple[Instance, ...]


def examples_of(lm: LanguageModel, name: str, task: Any, settings: Settings) -> Iterator[_Example]:
    """The items of a task that the settings ask for, in the order of its file."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=1234)  # the harness's own default
    own = (task.get_config("metadata") or {}).get("chat")
    chat = settings.chat if own is None else bool(own)
    long = _answer_length(task.get_config("generation_kwargs") or {}, settings) > 64
    count = settings.long_count if long and settings.long_count else settings.count
    own_counts = own is not None  # this project's tasks take `count` items themselves, RULER's of every length
    task.build_all_requests(
        limit=None if own_counts else count, apply_chat_template=chat, tokenizer_name=lm.name,
        chat_template=functools.partial(model_class.chat_text, lm.tokenizer) if chat else None,
    )  # fmt: skip
    by_doc: dict[int, list[Instance]] = {}
    for instance in task.instances:
        by_doc.setdefault(instance.doc_id, []).append(instance)
    if count is not None and not task.eval_docs[0].get("max_length"):
        by_doc = dict(itertools.islice(by_doc.items(), count))
    for number, requests in by_doc.items():
        requests.sort(key=lambda request: request.idx)
        yield _Example(f"{name}@{number}", name, task, requests[0].doc, tuple(requests))


def _answer_length(arguments: Mapping[str, Any], settings: Settings) -> int:
    longest = model_class.longest_answer(dict(arguments), DEFAULT_ANSWER)
    return min(longest, settings.most_new or longest)


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """What a model is asked to answer: token ids, how many at the end are fed after the eviction, and when the answer ends."""

    name: str
    task: str
    tokens: list[int]
    withheld: int
    new_tokens: int
    stop: list[str]


def prompt_of(lm: LanguageModel, example: _Example, settings: Settings) -> _Prompt | None:
    """The prompt of an example that asks for an answer; None for another, or if the answer leaves no room for the prompt."""
    if example.requests[0].request_type != "generate_until":
        return None
    text, arguments = example.requests[0].args
    new = _answer_length(arguments, settings)
    tokens, withheld = model_class.encode(lm.tokenizer, text)
    if new + withheld + 1 >= lm.config.max_positions:
        return None
    tokens, _ = model_class.fit(tokens, lm.config.max_positions - new)
    return _Prompt(
        example.name, example.task_name, tokens, shared.hidden_of(withheld), new, model_class.stops(arguments)
    )


def _evaluate(lm: LanguageModel, example: _Example, settings: Settings, arms: Sequence[Arm]) -> Record:
    """The record of one example."""
    record = blank_record(example)
    kind = example.requests[0].request_type
    if kind == "generate_until":
        length, was_cut, found, resps = _generate(lm, example, settings, arms)
    elif kind == "loglikelihood":
        length, was_cut, found, resps = _choose(lm, example, settings, arms)
    elif kind == "loglikelihood_rolling":
        length, was_cut, found, resps = _roll(lm, example, settings, arms)
    else:
        raise ConfigError(f"The task {example.task_name!r} has requests of kind {kind!r}, which no text model answers.")
    if not found:
        return record | {"length": length, "skipped": "the answer leaves no room for the prompt", "arms": {}}
    table: dict[str, dict[str, Any]] = {}
    for arm, result, responses in zip(arms, found, resps, strict=True):
        table.setdefault(arm.method, {})[budget_name(arm.budget)] = with_metrics(example, responses, result)
    return record | {"length": length, "cut": record["cut"] or was_cut, "arms": table}


def blank_record(example: _Example) -> Record:
    """What all records of an example say."""
    doc = example.doc
    return {
        "name": example.name, "task": example.task_name, "doc_length": doc.get("max_length", doc.get("length")),
        "evicted": "after the prefill", "cut": bool(doc.get("cut", False)),
    }  # fmt: skip


def with_metrics(example: _Example, responses: Sequence[Any], result: Record) -> Record:
    """One arm's result with its metrics; its score is the first of them."""
    metrics = _metrics(example, responses)
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    return {"score": next(iter(numbers.values()), None), "metrics": numbers, **result}


def _metrics(example: _Example, responses: Sequence[Any]) -> dict[str, Any]:
    """The harness's metrics of one arm's responses to an example's requests: "metric" or "metric,filter" -> value."""
    for request, response in zip(example.requests, responses, strict=True):
        request.resps, request.filtered_resps = [response], {}
    found: dict[str, Any] = {}
    filters = example.task._filters
    for ensemble in filters:
        ensemble.apply(list(example.requests))
        given = [request.filtered_resps[ensemble.name] for request in example.requests]
        for key, value in example.task.process_results(example.doc, given).items():
            found[key if len(filters) == 1 else f"{key},{ensemble.name}"] = value
    return found


def _generate(lm: LanguageModel, example: _Example, settings: Settings, arms: Sequence[Arm]):
    prompt = prompt_of(lm, example, settings)
    length = len(model_class.encode(lm.tokenizer, example.requests[0].args[0])[0])
    if prompt is None:
        return length, False, [], []
    answers = shared.answers(
        lm, prompt.tokens, arms, new_tokens=prompt.new_tokens, stop=prompt.stop, withheld=prompt.withheld,
        evict_every=0 if prompt.withheld else settings.evict_every, name=example.name, seed=settings.seed,
    )  # fmt: skip
    found = [
        {"answer": a.text, "answer_tokens": a.tokens, "ended": a.ended, "nll": None, "tokens": 0} | _common(a)
        for a in answers
    ]
    return len(prompt.tokens), len(prompt.tokens) < length, found, [[answer.text] for answer in answers]


def _choose(lm: LanguageModel, example: _Example, settings: Settings, arms: Sequence[Arm]):
    """Multiple choice: requests with the same context are scored after one reading of it."""
    encoded = []
    for request in example.requests:
        context, text = request.args
        spaces = len(context) - len(context.rstrip())
        context, text = context[: len(context) - spaces], context[len(context) - spaces :] + text
        whole, _ = model_class.encode(lm.tokenizer, context + text)
        start, withheld = model_class.encode(lm.tokenizer, context)
        encoded.append((tuple(start), tuple(whole[len(start) :]), withheld))
    if any(len(text) + 2 >= lm.config.max_positions for _, text, _ in encoded):
        return len(encoded[0][0]), False, [], []
    results: list[Any] = [None] * len(encoded)
    longest = max(len(text) for _, text, _ in encoded)
    was_cut = False
    for context in dict.fromkeys(start for start, _, _ in encoded):
        members = [i for i, (start, _, _) in enumerate(encoded) if start == context]
        prompt, cut = model_class.fit(context, lm.config.max_positions - longest)
        was_cut |= cut
        scored = shared.scores(
            lm, prompt, [encoded[i][1] for i in members], arms, withheld=encoded[members[0]][2],
            evict_every=settings.evict_every, name=example.name, seed=settings.seed,
        )  # fmt: skip
        for i, result in zip(members, scored, strict=True):
            results[i] = result
    found, resps = [], []
    for a in range(len(arms)):
        mine = [result[a] for result in results]
        best = max(range(len(mine)), key=lambda i: mine[i].nats)
        found.append(
            {"answer": example.requests[best].args[1].strip(), "answer_tokens": mine[best].tokens, "ended": True, "nll": None,
             "tokens": 0} | _common(mine[0])
        )  # fmt: skip
        resps.append([(one.nats, one.greedy) for one in mine])
    return len(encoded[0][0]), was_cut, found, resps


def _roll(lm: LanguageModel, example: _Example, settings: Settings, arms: Sequence[Arm]):
    """Perplexity: each window's second half is scored after its first half was evicted."""
    (text,) = example.requests[0].args
    prefix = lm.tokenizer.bos_id if lm.tokenizer.bos_id is not None else lm.tokenizer.eos_ids[0]
    windows = model_class.halves(lm, text, prefix, lm.config.max_positions)
    before = sum(model_class.opening(lm, first) for first, _ in windows)
    parts = [
        shared.scores(
            lm, first, [second], arms, evict_every=settings.evict_every, name=example.name, seed=settings.seed
        )[0]
        for first, second in windows
        if second
    ]
    if not parts:
        return len(windows[0][0]), False, [], []
    found, resps = [], []
    for a in range(len(arms)):
        mine = [part[a] for part in parts]
        tokens = sum(part.tokens for part in mine)
        nats = sum(part.nats for part in mine)
        found.append(
            {"answer": "", "answer_tokens": 0, "ended": True, "nll": -nats / tokens, "tokens": tokens}
            | _common(mine[0])
        )
        resps.append([before + nats])
    return sum(len(first) + len(second) - 1 for first, second in windows), False, found, resps


def _common(result: shared.Answer | shared.Scored) -> dict[str, Any]:
    return {
        "kl": result.kl, "top1": result.top1, "kept": round(result.kept, 6), "retained": list(result.retained), "seconds": None
    }  # fmt: skip


def markdown(header: Record, found: Sequence[Record]) -> str:
    """One table a budget: for each task and method the mean score in percent and the mean KL in nats, with 95% intervals.

    Perplexity tasks have their perplexity in place of the score. Numbers in brackets behind a task: its examples.
    """
    methods = list(dict.fromkeys(arm["method"] for arm in header["arms"]))
    budgets = [name for name in dict.fromkeys(arm["budget"] for arm in header["arms"]) if name != "100%"]
    used = [record for record in found if record["arms"]]
    tasks = list(dict.fromkeys(map(_row_name, used)))
    lines = []
    for budget in budgets:
        lines += [
            f"### {budget} of the cache",
            "",
            f"| task (examples) | {' | '.join(methods)} |",
            "|---" * (len(methods) + 1) + "|",
        ]
        for task in tasks:
            rows = [record["arms"] for record in used if _row_name(record) == task]
            cells = [_cell([row[m].get(budget) or row[m]["100%"] for row in rows], m == "full") for m in methods]
            lines.append(f"| {task} ({len(rows)}) | {' | '.join(cells)} |")
        lines.append("")
    left = len(found) - len(used)
    if left:
        lines.append(f"{left} examples were skipped: their answers leave no room for the prompt.")
    return "\n".join(lines) + "\n"


def _row_name(record: Record) -> str:
    """RULER's lengths have rows of their own."""
    return f"{record['task']} at {record['doc_length']}" if "ruler" in record["task"] else record["task"]


def _cell(results: Sequence[Mapping[str, Any]], full: bool) -> str:
    if all(result["nll"] is not None for result in results):
        nats = sum(result["nll"] * result["tokens"] for result in results)
        main = f"ppl {math.exp(nats / sum(result['tokens'] for result in results)):.2f}"
    else:
        score = statistics.mean([100 * result["score"] for result in results])
        main = f"{score.value:.1f}" if score.n < 2 else f"{score.value:.1f} [{score.low:.0f}, {score.high:.0f}]"
    known = [result["kl"] for result in results if result["kl"] is not None]
    return main if full or not known else f"{main}; {max(sum(known) / len(known), 0.0):.3f}"
