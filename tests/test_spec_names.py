"""The names that `sharpen` offers, and the specification's names among them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sharpen

SRC = Path(sharpen.__file__).parent
USERS_OF_SPEC = ("spec", "cli", "__init__.py")  # what may import `sharpen.spec`
# the names that the documents give their classes and functions, as far as they are built
SPECIFIED = (
    "AgentSFTConfig",
    "AgentSFTFormatter",
    "AgentSFTTrainer",
    "AgentLoRATrainer",
    "AgentDialogProcessor",
    "ProcessedDialog",
    "CoresetSelector",
    "OnlineContinualLearner",
    "AgentRewardConfig",
    "AgentRewardModel",
    "ToolVerifier",
    "PlanEvaluator",
    "RLTrainingConfig",
    "AgentRLTrainer",
    "AgentTrainingEvaluator",
    "AgentTrainingUsage",
    "R1TrainingConfig",
    "R1StyleTrainer",
    "VerifiableRewardCalculator",
    "RLVRHackingDetector",
    "RLVRRewardShaping",
    "ReasoningDataGenerator",
    "ToolCallDataGenerator",
    "ToolCallEvaluator",
    "ReActDataGenerator",
    "AgentTrajectoryRL",
    "LongContextDataGenerator",
    "ModelMerger",
    "TaskVectorArithmetic",
    "merge_domain_experts",
)


@pytest.mark.parametrize("name", sharpen.__all__)
def test_every_public_name_imports(name: str) -> None:
    value = getattr(sharpen, name)
    assert value.__name__ == name


def test_the_star_gives_every_public_name() -> None:
    namespace: dict[str, object] = {}
    exec("from sharpen import *", namespace)
    assert set(sharpen.__all__) <= set(namespace)
    assert dir(sharpen) == sorted(sharpen.__all__)
    assert len(set(sharpen.__all__)) == len(sharpen.__all__)


def test_the_names_of_the_specification_are_public() -> None:
    assert set(SPECIFIED) <= set(sharpen.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        sharpen.Nothing  # noqa: B018


def test_one_name_does_not_import_the_specification() -> None:
    code = (
        "import sys; from sharpen import AgentSFTConfig; "
        "assert not [name for name in sys.modules if name.startswith('sharpen.spec')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_does_not_import_the_specification() -> None:
    wrong = []
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).parts[0] in USERS_OF_SPEC:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for module in _named_modules(node):
                if module == "sharpen.spec" or module.startswith("sharpen.spec."):
                    wrong.append(f"{path.relative_to(SRC)}:{node.lineno}: {module}")
    assert not wrong


def _named_modules(node: ast.AST) -> list[str]:
    """Returns the modules that a node imports, or names in a string, such as a lazy table's."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []
