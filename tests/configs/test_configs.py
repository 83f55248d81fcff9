import dataclasses
import re

import pytest
from ml_collections import ConfigDict

from configs import foresightkv_smollm2, kvp_smollm2, kvzap_smollm2, mistral7b, rlkv_smollm2, smollm2
from dcache.errors import BudgetError, ConfigError
from dcache.experiment import Experiment, from_config
from dcache.learn.loop import train
from dcache.signals import PAPER_SIGNALS

MODULES = (foresightkv_smollm2, kvp_smollm2, kvzap_smollm2, mistral7b, rlkv_smollm2, smollm2)
ALL = [(module, variant) for module in MODULES for variant in ("", *module.VARIANTS)]


@pytest.mark.parametrize("module,variant", ALL, ids=lambda x: getattr(x, "__name__", x or "default"))
def test_every_configuration_is_valid(module, variant):
    config = module.get_config(variant) if variant else module.get_config()
    assert isinstance(from_config(config), Experiment)
    name = module.__name__.removeprefix("configs.")
    assert config.name == (f"{name}-{variant}" if variant else name)
    # The docstring explains every variant and gives the command.
    assert f"--config=configs/{name}.py" in module.__doc__ and (
        not variant or re.search(rf"\n  (\w+, )*{variant}[ ,\n]", module.__doc__)
    )
    # Every field can be set on the command line.
    experiment = from_config(config)
    assert set(config.learn) == {field.name for field in dataclasses.fields(experiment.learn)}
    assert set(config.policy) == {field.name for field in dataclasses.fields(experiment.policy)}
    assert set(config.eval) == {field.name for field in dataclasses.fields(experiment.eval)}


@pytest.mark.parametrize("module", MODULES)
def test_unknown_variants(module):
    with pytest.raises(ConfigError, match=f"no variant 'huge'; use one of {', '.join(module.VARIANTS)}"):
        module.get_config("huge")


def test_paper_settings():
    paper = from_config(mistral7b.get_config())
    learn, data, policy = paper.learn, paper.data, paper.policy
    assert (paper.model, paper.dtype) == ("mistralai/Mistral-7B-Instruct-v0.3", "bfloat16")
    assert (learn.steps, learn.warmup_steps, learn.learning_rate, learn.clip_norm) == (10_000, 500, 3e-4, 1.0)
    assert (learn.gamma, learn.entropy_bonus, learn.minimum, learn.final_rate) == (0.99, 0.01, 32, 0.0)
    assert (learn.evict_every, learn.ratios) == (1, (0.5, 0.25, 0.125))
    assert (policy.signals, policy.hidden, policy.layers) == (PAPER_SIGNALS, 128, 2)
    assert (data.source, data.length, data.trajectory) == ("longbench+gsm8k", 4096, "teacher")
    assert (learn.law, learn.entropy_form) == ("plackett_luce", "score")
    for module, variant in ((mistral7b, "faithful"), (smollm2, "paper")):
        learn = from_config(module.get_config(variant)).learn
        assert (learn.law, learn.entropy_form, learn.evict_every) == ("paper", "direct", 1)


def test_kvp_paper_settings():
    paper = from_config(kvp_smollm2.get_config("paper"))
    learn, policy = paper.learn, paper.policy
    assert (learn.steps, learn.warmup_steps, learn.learning_rate, learn.clip_norm) == (4000, 100, 5e-5, 5.0)
    assert learn.learning_rate * learn.final_rate == pytest.approx(1e-6) and learn.standardise and learn.average == 0.0
    assert (policy.hidden, policy.sinks, policy.fit(1000).recent) == (256, 4, 16)


def test_foresightkv_paper_settings():
    first, second = (from_config(foresightkv_smollm2.get_config(variant)).learn for variant in ("", "grpo"))
    assert (first.stage, first.steps, first.warmup_steps, first.learning_rate) == ("ranking", 1000, 10, 1e-2)
    assert (first.margin, first.clip_norm, first.weight_decay, first.final_rate) == (0.01, 1.0, 0.0, 0.0)
    assert (second.stage, second.steps, second.learning_rate, second.final_rate) == ("grpo", 250, 3e-4, 1.0)
    assert (second.clip, second.kl_weight, second.kl_steps, second.rise, second.confident) == (0.2, 0.05, 100, 1.5, 0.8)


def changed(**fields):
    """The tiny configuration with fields added or replaced; `learn__steps` means learn.steps."""
    plain = smollm2.get_config("tiny").to_dict()
    for name, value in fields.items():
        *groups, last = name.split("__")
        place = plain
        for group in groups:
            place = place[group]
        place[last] = value
    return ConfigDict(plain)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"lerning": 1}, "config has no field lerning; its fields are name, method"),
        ({"learn__stepz": 1}, "config.learn has no field stepz; its fields are steps, learning_rate"),
        ({"policy__width": 1}, "config.policy has no field width"),
        ({"learn__steps": "240"}, r"config.learn.steps is '240' \(str\); give int"),
        ({"learn__steps": 2.5}, r"config.learn.steps is 2.5 \(float\); give int"),
        ({"seed": True}, r"config.seed is True \(bool\); give int"),
        ({"learn__ratios": 0.25}, r"config.learn.ratios is 0.25 \(float\); give a tuple"),
        ({"learn__ratios": (0.25, "x")}, r"config.learn.ratios\[1\] is 'x' \(str\); give float"),
        ({"data__longbench_dir": 3}, r"config.data.longbench_dir is 3 \(int\); give str or None"),
        ({"learn__law": "bernoulli"}, "config.learn.law is 'bernoulli'; use one of 'plackett_luce', 'subset', 'paper'"),
        ({"data__trajectory": "own"}, "config.data.trajectory is 'own'; use one of 'mixed', 'teacher', 'given'"),
        ({"learn": 3}, "config.learn is 3; give a group of fields"),
        ({"teacher_batch": 0}, "teacher_batch is 0; give 1 or more"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"data__length": 8}, "data.length is 8"),
        ({"data__retrieval": 1.5}, "data.retrieval is 1.5"),
        ({"policy__signals": ("alpha", "vibes")}, r"Unknown signals \['vibes'\]"),
        (
            {"policy__signals": ("alpha",), "policy__prior": (), "policy__granularity": "head"},
            "REINFORCE and the ranker train 'sequence' policies",
        ),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        from_config(changed(**fields))


def test_bad_budgets_and_missing_fields():
    with pytest.raises(BudgetError, match="ratio 1.5"):
        from_config(changed(eval__budgets=(0.5, 1.5)))
    plain = smollm2.get_config("tiny").to_dict()
    del plain["model"], plain["eval"]["prompts"]
    with pytest.raises(ConfigError, match="config lacks model; see"):
        from_config(plain)
    plain["model"] = "tiny"
    with pytest.raises(ConfigError, match="config.eval lacks prompts"):
        from_config(plain)


def test_whole_numbers_and_lists_are_accepted():
    experiment = from_config(changed(learn__gamma=1, learn__ratios=[1, 0.5], eval__budgets=(0.5, 128)))
    assert experiment.learn.gamma == 1.0 and isinstance(experiment.learn.gamma, float)
    assert experiment.learn.ratios == (1.0, 0.5) and hash(experiment.learn)
    assert experiment.eval.budgets == (0.5, 128) and type(experiment.eval.budgets[1]) is int  # a count stays a count


@pytest.mark.parametrize("module", MODULES)
def test_tiny_variants_train(module, tmp_path):
    experiment = from_config(module.get_config("tiny"))
    outcome = train(experiment, tmp_path)
    assert outcome.trained and outcome.step == outcome.steps == experiment.learn.steps


def test_rlkv_as_published():
    learn = from_config(rlkv_smollm2.get_config("paper")).learn
    assert (learn.steps, learn.questions, learn.samples, learn.learning_rate) == (185, 32, 4, 0.01)
    assert (learn.sinks, learn.recent, learn.penalty, learn.threshold) == (128, 256, 1e-3, 0.5)
