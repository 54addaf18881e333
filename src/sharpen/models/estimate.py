"""Estimates what a training run will need: parameters, memory by part, tokens, and hours.

The formulas are those of a dense decoder trained in bf16 with AdamW. Activations are the least
certain part; the hours assume a share of the card's peak that is stated next to them. Called by
`sharpen estimate` and by the trainers' checks of disk space and speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from sharpen.config import Config, read_yaml
from sharpen.models.load import LINEAR_LAYERS
from sharpen.records import read_json
from sharpen.types import Json, SharpenError

_GIB = 1 << 30
# bytes per weight, with the constants of quantisation
_BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.06, "4bit": 0.56}
_LOGITS_CHUNK_TOKENS = 8192  # cross-entropy is computed in chunks of this many tokens
_USABLE_MEMORY = 0.95  # share of a card's memory that a run may fill


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a CPU with its main memory."""

    memory_gib: float
    peak: float  # dense bf16 FLOP/s; for a CPU what two cores were measured to sustain
    share: float  # of the peak that training reaches


CARDS = {
    "A100-80G": Card(80, 312e12, 0.4),
    "H100-80G": Card(80, 989e12, 0.35),
    "H200": Card(141, 989e12, 0.35),
    "RTX4090": Card(24, 165e12, 0.4),
    "RTX3060": Card(12, 51e12, 0.4),
    "cpu": Card(16, 1.1e11, 1.0),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a dense decoder that decide its cost."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    qkv_bias: bool = False
    head_dim: int = 0  # 0: hidden / heads

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head

    def linears(self) -> dict[str, tuple[int, int]]:
        """Returns the linear maps of a layer: name → (in, out)."""
        return {
            "q_proj": (self.hidden, self.query_width),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.query_width, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def parameters(self) -> int:
        """Returns the number of weights of the model."""
        matrices = sum(inputs * outputs for inputs, outputs in self.linears().values())
        norms = 2 * self.hidden
        layer = matrices + norms
        if self.qkv_bias:
            layer += self.query_width + 2 * self.kv_width
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        last_norm = self.hidden
        return self.layers * layer + embeddings + last_norm

    def lora_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Returns the number of weights of a LoRA adapter on these linear maps."""
        linears = self.linears()
        layer = 0
        for target in targets:
            if target in linears:
                inputs, outputs = linears[target]
                layer += rank * (inputs + outputs)
        return self.layers * layer


class Preset(Config):
    """The settings of a training run that decide its cost.

    Field names are those of the training configs, which take all but those in `ESTIMATE_ONLY`.
    """

    method: Literal["sft", "dpo", "ppo", "grpo"] = "sft"
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    max_length: int = Field(4096, ge=1)
    lora_r: int = Field(64, ge=0)  # 0: full fine-tuning
    lora_alpha: int = 128
    lora_dropout: float = 0.05
    lora_target_modules: tuple[str, ...] = LINEAR_LAYERS
    num_epochs: int = Field(3, ge=1)
    batch_size: int = Field(4, ge=1)
    gradient_accumulation: int = Field(8, ge=1)
    learning_rate: float = 2e-5
    gradient_checkpointing: bool = False
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    token_budget: int = Field(0, ge=0)  # of a micro-batch; 0: batch_size × max_length
    parallel: str = "auto"
    compile: bool = False
    use_coreset_selection: bool = False
    coreset_target_size: int = Field(8000, ge=1)
    card: str = "A100-80G"
    cards: int = Field(1, ge=1)
    dialogs: int = Field(4000, ge=1)
    mean_tokens: int = Field(900, ge=1)  # per dialog
    rollouts: int = Field(4, ge=1)  # answers sampled per prompt, in PPO and GRPO


ESTIMATE_ONLY = ("method", "card", "cards", "dialogs", "mean_tokens", "rollouts")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run is estimated to need. `sharpen estimate --json` prints these fields."""

    parameters: int
    trainable: int
    memory_gib: dict[str, float]  # per card, by part
    tokens: int
    hours: float
    note: str

    @property
    def total_gib(self) -> float:
        """Memory per card, all parts together."""
        return sum(self.memory_gib.values())


def estimate(preset: Preset) -> Estimate:
    """Estimate a training run."""
    shape = find_shape(preset.base_model)
    card = CARDS.get(preset.card)
    if card is None:
        raise SharpenError(f"card {preset.card!r}: known cards are {', '.join(CARDS)}")
    parameters = shape.parameters()
    trainable = parameters
    if preset.lora_r:
        trainable = shape.lora_parameters(preset.lora_r, preset.lora_target_modules)
    bytes_by_part = _bytes_per_card(preset, shape, trainable)
    memory = {part: count / _GIB for part, count in bytes_by_part.items()}
    tokens = preset.num_epochs * preset.dialogs * preset.mean_tokens
    flops = _total_flops(preset, parameters, tokens)
    hours = flops / (card.peak * card.share * preset.cards) / 3600
    fits = sum(memory.values()) <= card.memory_gib * _USABLE_MEMORY
    verdict = "fits" if fits else "does NOT fit"
    note = f"{verdict} {preset.cards} × {preset.card} ({card.memory_gib:g} GiB each)"
    note += f"; time at {card.share:.0%} of its peak"
    return Estimate(parameters, trainable, memory, tokens, hours, note)


def _bytes_per_card(preset: Preset, shape: Shape, trainable: int) -> dict[str, float]:
    """Returns the bytes of each part on each card.

    Weights and optimiser are sharded over the cards; each card has a micro-batch of its own.
    """
    weights = shape.parameters() * _BYTES_PER_WEIGHT[_weight_format(preset)]
    step_tokens = preset.token_budget or preset.batch_size * preset.max_length
    if preset.method == "dpo":  # chosen and rejected
        step_tokens *= 2
    has_adapter = preset.lora_r > 0
    sharded = {
        "weights": weights,
        "critic": weights if preset.method == "ppo" else 0.0,
        "adapter": trainable * 2.0 if has_adapter else 0.0,
        "gradients": trainable * (2.0 if has_adapter else 4.0),
        "optimiser": trainable * 8.0,
    }
    memory = {part: count / preset.cards for part, count in sharded.items() if count}
    memory["activations"] = _activation_bytes(preset, shape, step_tokens)
    memory["logits"] = min(step_tokens, _LOGITS_CHUNK_TOKENS) * shape.vocab * 6.0
    if preset.method in ("ppo", "grpo"):
        cache_per_token = 2 * shape.layers * shape.kv_heads * shape.head * 2.0
        memory["rollout cache"] = cache_per_token * step_tokens * preset.rollouts
    return memory


def _weight_format(preset: Preset) -> str:
    """Returns how the weights are held in memory."""
    if preset.card == "cpu":
        return "float32"
    if preset.load_in_4bit:
        return "4bit"
    if preset.load_in_8bit:
        return "8bit"
    return "bfloat16"


def _activation_bytes(preset: Preset, shape: Shape, tokens: int) -> float:
    """Returns the bytes of the bf16 values kept for the backward pass.

    With gradient checkpointing these are one row per layer, and the values of one whole layer.
    """
    values = 4 * shape.hidden + 2 * shape.query_width + 2 * shape.kv_width + 4 * shape.intermediate
    if preset.lora_r:
        values += preset.lora_r * len(preset.lora_target_modules)
    if preset.gradient_checkpointing:
        return 2.0 * tokens * (shape.hidden * shape.layers + values)
    return 2.0 * tokens * values * shape.layers


def _total_flops(preset: Preset, parameters: int, tokens: int) -> float:
    """Returns the FLOPs of a run.

    Per parameter and token these are 2 forward and 4 backward (2 if the weights are frozen), and
    what the method adds.
    """
    train = (4.0 if preset.lora_r else 6.0) * parameters * tokens
    forward = 2.0 * parameters * tokens
    if preset.method == "dpo":  # chosen and rejected, and the reference model over both
        return 2 * (train + forward)
    if preset.method in ("ppo", "grpo"):
        reference = forward
        sampling = 10 * forward  # a tenth as fast as training
        critic = train + forward if preset.method == "ppo" else 0.0
        return preset.rollouts * (train + reference + sampling + critic)
    return train


def find_shape(model: str) -> Shape:
    """Returns a model's shape from its folder's config.json, or from the table of known ones."""
    config = Path(model) / "config.json"
    if config.is_file():
        return read_shape(read_json(config), model)
    known = read_yaml(Path(__file__).with_name("shapes.yaml"))
    if model not in known:
        names = ", ".join(known)
        raise SharpenError(f"{model}: neither a model folder nor a known shape ({names})")
    return Shape(**known[model])


def read_shape(config: Json, where: str) -> Shape:
    """Returns the shape that a config.json describes; `where` names the model in errors."""
    try:
        return Shape(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=config.get("model_type") == "qwen2" or bool(config.get("attention_bias")),
            head_dim=config.get("head_dim") or 0,
        )
    except KeyError as error:
        missing = f"config.json has no {error.args[0]}"
        raise SharpenError(f"{where}: {missing}, cannot estimate") from None


def estimate_inference(
    model: str, rows: int, tokens: int, batch_size: int, card: str = "cpu"
) -> Estimate:
    """Estimate answering `rows` prompts with `tokens` tokens in all."""
    shape = find_shape(model)
    machine = CARDS[card]
    parameters = shape.parameters()
    bytes_per_value = 4.0 if card == "cpu" else 2.0
    cache_per_token = 2 * shape.layers * shape.kv_heads * shape.head * bytes_per_value
    cache = cache_per_token * tokens / max(rows, 1) * batch_size
    memory = {"weights": parameters * bytes_per_value / _GIB, "cache": cache / _GIB}
    hours = 2.0 * parameters * tokens / (machine.peak * machine.share) / 3600
    return Estimate(parameters, 0, memory, tokens, hours, f"{rows} answers on {card}")


# The resource table of the pipeline's specification (section 6.1): stage, data, GB, hours, and
# the settings that they are for.
SPEC_TABLE: tuple[tuple[str, str, float, float, Preset], ...] = (
    ("SFT", "4K dialogs", 60, 8, Preset(load_in_8bit=True)),
    (
        "DPO",
        "2K pairs",
        70,
        4,
        Preset(method="dpo", load_in_8bit=True, dialogs=2000, batch_size=2),
    ),
    (
        "PPO",
        "online",
        140,
        12,
        Preset(method="ppo", load_in_8bit=True, dialogs=2000, cards=2, num_epochs=1),
    ),
)
