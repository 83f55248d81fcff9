"""Table 4: the policy trained on one model, used on another without training, at 25%; rivals retrained.

    python launch/report.py --config=configs/paper/table4.py
    python launch/report.py --config=configs/paper/table4.py --config.model=smollm2

Expected: the paper has DistillCache zero-shot on Llama-3-8B-Instruct at 38.4 and 46.2, full cache 42.8 and 56.4.
Cost: the evaluation needs Llama-3-8B-Instruct and an accelerator (days, with five seeds); the report itself takes
seconds to minutes. The second command shows what was measured on the default model, beside the paper's numbers and
never as a reproduction of them.
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config() -> ConfigDict:
    methods = {
        "Full cache": "full", "H2O": "h2o", "SnapKV": "snapkv", "ForesightKV (retrained)": "foresightkv",
        "RLKV (retrained)": "rlkv", "DistillCache (zero-shot)": "distillcache-transfer",
    }  # fmt: skip
    transfer = (
        f"{base.evaluation('dcache_longbench,gsm8k_cot,bbh_fewshot')} --policy=distillcache-transfer=runs/mistral7b"
    )
    return base.make("table4", model=base.LLAMA, methods=methods, commands=(transfer,))
