"""What a training run will need, before a GPU is rented: parameters, memory by part, tokens, a
guess at the time.

The formulas are those of a dense decoder trained in bf16 with AdamW. Activations are the least
certain part; the guess of time assumes a share of the card's peak that is stated beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from sharpen.config import Config, read_yaml
from sharpen.models.load import LINEAR_LAYERS
from sharpen.records import read_json
from sharpen.types import SharpenError

GIB = 1 << 30
BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.06, "4bit": 0.56}  # with quantisation constants


@dataclass(frozen=True, slots=True)
class Card:
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
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    qkv_bias: bool = False
    head_dim: int = 0

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """A layer's linear maps: name → (in, out)."""
        wide, narrow = self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (self.hidden, wide),
            "k_proj": (self.hidden, narrow),
            "v_proj": (self.hidden, narrow),
            "o_proj": (wide, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def parameters(self) -> int:
        layer = sum(a * b for a, b in self.linears().values()) + 2 * self.hidden
        if self.qkv_bias:
            layer += (self.heads + 2 * self.kv_heads) * self.head
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    def lora_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        linears = self.linears()
        return self.layers * sum(rank * sum(linears[t]) for t in targets if t in linears)


class Preset(Config):
    """The settings of a training run that decide its cost. Field names are those of the training
    configs, which take all but those in `ESTIMATE_ONLY`."""

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
    mean_tokens: int = Field(900, ge=1)
    rollouts: int = Field(4, ge=1)  # answers sampled a prompt, in PPO and GRPO


ESTIMATE_ONLY = ("method", "card", "cards", "dialogs", "mean_tokens", "rollouts")


@dataclass(frozen=True, slots=True)
class Estimate:
    parameters: int
    trainable: int
    memory_gib: dict[str, float]
    tokens: int
    hours: float
    note: str

    @property
    def total_gib(self) -> float:
        return sum(self.memory_gib.values())


def estimate(preset: Preset) -> Estimate:
    shape = find_shape(preset.base_model)
    card = CARDS.get(preset.card)
    if card is None:
        raise SharpenError(f"card {preset.card!r}: known cards are {', '.join(CARDS)}")
    whole, rank = shape.parameters(), preset.lora_r
    trainable = shape.lora_parameters(rank, preset.lora_target_modules) if rank else whole
    memory = {part: count / GIB for part, count in card_bytes(preset, shape, trainable).items()}
    tokens = preset.num_epochs * preset.dialogs * preset.mean_tokens
    hours = total_flops(preset, whole, tokens) / (card.peak * card.share * preset.cards) / 3600
    fits = "fits" if sum(memory.values()) <= card.memory_gib * 0.95 else "does NOT fit"
    note = f"{fits} {preset.cards} × {preset.card} ({card.memory_gib:g} GiB each)"
    note += f"; time at {card.share:.0%} of its peak"
    return Estimate(whole, trainable, memory, tokens, hours, note)


def card_bytes(preset: Preset, shape: Shape, trainable: int) -> dict[str, float]:
    """Bytes by part on each card: weights and optimiser are sharded, each has a micro-batch."""
    held = "4bit" if preset.load_in_4bit else "8bit" if preset.load_in_8bit else "bfloat16"
    if preset.card == "cpu":
        held = "float32"
    weights = shape.parameters() * BYTES[held]
    step_tokens = preset.token_budget or preset.batch_size * preset.max_length
    step_tokens *= 2 if preset.method == "dpo" else 1
    sharded = {
        "weights": weights,
        "critic": weights if preset.method == "ppo" else 0.0,
        "adapter": trainable * 2.0 if preset.lora_r else 0.0,
        "gradients": trainable * (2.0 if preset.lora_r else 4.0),
        "optimiser": trainable * 8.0,
    }
    own = {
        "activations": activation_bytes(preset, shape, step_tokens),
        "logits": min(step_tokens, 8192) * shape.vocab * 6.0,  # cross-entropy in chunks of 8,192
    }
    if preset.method in ("ppo", "grpo"):
        a_token = 2 * shape.layers * shape.kv_heads * shape.head * 2.0
        own["rollout cache"] = a_token * step_tokens * preset.rollouts
    return {part: count / preset.cards for part, count in sharded.items() if count} | own


def activation_bytes(preset: Preset, shape: Shape, tokens: int) -> float:
    """bf16 values kept for the backward pass; checkpointed, a row a layer and one whole layer."""
    wide, narrow = shape.heads * shape.head, shape.kv_heads * shape.head
    values = 4 * shape.hidden + 2 * wide + 2 * narrow + 4 * shape.intermediate
    if preset.lora_r:
        values += preset.lora_r * len(preset.lora_target_modules)
    if preset.gradient_checkpointing:
        return 2.0 * tokens * (shape.hidden * shape.layers + values)
    return 2.0 * tokens * values * shape.layers


def total_flops(preset: Preset, parameters: int, tokens: int) -> float:
    """Forward 2, backward 4 (2 if frozen) a parameter and token, and what the method adds."""
    train = (4.0 if preset.lora_r else 6.0) * parameters * tokens
    forward = 2.0 * parameters * tokens
    if preset.method == "dpo":  # chosen and rejected, and the reference over both
        return 2 * (train + forward)
    if preset.method in ("ppo", "grpo"):  # sampling a tenth as fast as training, reference, critic
        critic = train + forward if preset.method == "ppo" else 0.0
        return preset.rollouts * (train + forward + 10 * forward + critic)
    return train


def find_shape(model: str) -> Shape:
    """A model's shape from its folder's config.json, or from the table of known ones."""
    config = Path(model) / "config.json"
    if config.is_file():
        return shape_of(read_json(config), model)
    known = read_yaml(Path(__file__).with_name("shapes.yaml"))
    if model not in known:
        names = ", ".join(known)
        raise SharpenError(f"{model}: neither a model folder nor a known shape ({names})")
    return Shape(**known[model])


def shape_of(config: dict, where: str) -> Shape:
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


def inference(model: str, rows: int, tokens: int, batch_size: int, card: str = "cpu") -> Estimate:
    """Answering `rows` prompts with `tokens` in all: weights, one batch's cache, and the time."""
    shape, machine = find_shape(model), CARDS[card]
    width = 4.0 if card == "cpu" else 2.0
    a_token = 2 * shape.layers * shape.kv_heads * shape.head * width
    cache = a_token * tokens / max(rows, 1) * batch_size
    memory = {"weights": shape.parameters() * width / GIB, "cache": cache / GIB}
    hours = 2.0 * shape.parameters() * tokens / (machine.peak * machine.share) / 3600
    return Estimate(shape.parameters(), 0, memory, tokens, hours, f"{rows} answers on {card}")


PPO = Preset(method="ppo", load_in_8bit=True, dialogs=2000, cards=2, num_epochs=1)
# The resource table of the pipeline's specification (section 6.1), and the settings behind it.
SPEC_TABLE: tuple[tuple[str, str, float, float, Preset], ...] = (
    ("SFT", "4K dialogs", 60, 8, Preset(load_in_8bit=True)),
    ("DPO", "2K pairs", 70, 4, Preset(method="dpo", load_in_8bit=True, dialogs=2000, batch_size=2)),
    ("PPO", "online", 140, 12, PPO),
)
