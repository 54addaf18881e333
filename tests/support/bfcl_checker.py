"""Run by the oracle's Python: cases on standard input, the BFCL checker's verdicts on standard
output. A checker that raises is reported as such."""

import json
import sys
import types

# The model list imports every vendor's client; of it the checker only asks whether dots in names
# became underscores.
models = types.ModuleType("bfcl_eval.constants.model_config")
models.MODEL_CONFIG_MAPPING = {"plain": types.SimpleNamespace(underscore_to_dot=False)}
sys.modules["bfcl_eval.constants.model_config"] = models

from bfcl_eval.constants.enums import Language  # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402


def verdict(case):
    """True or False, or why the checker raised."""
    language = Language(case["language"])
    category = case["category"]
    calls = [{call["name"]: call["arguments"]} for call in case["predicted"]]
    try:
        answer = ast_checker(case["functions"], calls, case["answers"], language, category, "plain")
        return answer["valid"]
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


output = sys.stdout
sys.stdout = sys.stderr  # the checker prints now and then
json.dump([verdict(case) for case in json.load(sys.stdin)], output)
