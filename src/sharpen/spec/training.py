"""The training pipeline document's name for the trainer of LoRA adapters."""

from __future__ import annotations

from sharpen.train.sft import AgentSFTTrainer


class AgentLoRATrainer(AgentSFTTrainer):
    """The training pipeline document's name for `AgentSFTTrainer` (section 4.2).

    Adapters are the default there, so this class only adds the document's name of one method.
    """

    def prepare_data(self) -> None:
        """The document's name for `prepare_datasets`: read, select and render the rows."""
        self.prepare_datasets()
